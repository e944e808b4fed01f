"""MELT's definition in NumPy and float64, token by token and head by head."""

import numpy as np
from numpy_layers import (
  attended,
  in_float64,
  layer_of,
  rms_normed,
  rotated,
  sigmoid,
  swiglu,
)


def _norm(config, x, gain):
  return rms_normed(x, config.norm_epsilon) * gain


def _keep(config, gate, loop, x, latent):
  """z after the first loop; `loop` counts from 0."""
  fixed = {"mean": loop / (loop + 1), "ema": 0.2, "last": 0.0, "first": 1.0}
  if config.gate in fixed:
    return fixed[config.gate]
  return sigmoid(
    x @ gate["input"]["kernel"]
    + latent @ gate["latent"]["kernel"]
    + gate["bias"]
  )


def hidden_of_loops(params, config, tokens, chunk, alpha=1.0):
  """The output of every loop for one row of tokens: [K, T, D]."""
  params = in_float64(params)
  layers, gates = params["layers"], params.get("latent_gates", {})
  per_layer = range(config.num_layers)
  layers = [layer_of(layers, n) for n in per_layer]
  gates = [layer_of(gates, n) for n in per_layer]
  head = config.block_shape().head_width
  final = {}  # (loop, layer) -> keys and values of finished chunks' tokens.
  outputs = []
  for start in range(0, len(tokens), chunk):
    places = range(start, start + chunk)
    x = params["token_embedding"]["embedding"][tokens[start : start + chunk]]
    latents, inputs, ends = {}, {}, []

    def rows(layer, latent, places=places):
      key, value = (latent @ layer["attention"][n]["kernel"] for n in _KV)
      key, value = (y.reshape(chunk, -1, head) for y in (key, value))
      base = config.rope_base
      key = [rotated(k, p, base) for k, p in zip(key, places, strict=True)]
      return list(zip(key, value, strict=True))

    for loop in range(config.num_loops):
      for n in per_layer:
        layer = layers[n]
        normed = _norm(config, x, layer["attention_norm"]["scale"])
        latent = normed
        if loop:
          keep = _keep(config, gates[n], loop, normed, latents[n])
          latent = keep * latents[n] + (1 - keep) * normed
        latents[n], inputs[loop, n] = latent, normed
        own = rows(layer, alpha * latent + (1 - alpha) * normed)
        seen = final.get((loop, n), [])
        query = (normed @ layer["attention"]["query"]["kernel"]).reshape(
          chunk, -1, head
        )
        mixed = [
          attended(rotated(query[i], place, config.rope_base),
                   seen + own[: i + 1])
          for i, place in enumerate(places)
        ]  # fmt: skip
        mixed = np.reshape(mixed, (chunk, -1))
        mixed = mixed @ layer["attention"]["output"]["kernel"]
        x = x + _post(config, layer, "attention_post_norm", mixed)
        inner = _norm(config, x, layer["mlp_norm"]["scale"])
        opened = swiglu(inner, layer["mlp"])
        x = x + _post(config, layer, "mlp_post_norm", opened)
      x = _norm(config, x, params["final_norm"]["scale"])
      ends.append(x)
    for loop, n in inputs:
      mixture = alpha * latents[n] + (1 - alpha) * inputs[loop, n]
      final.setdefault((loop, n), []).extend(rows(layers[n], mixture))
    outputs.append(np.stack(ends))
  return np.concatenate(outputs, axis=1)


_KV = ("key", "value")


def _post(config, layer, name, x):
  return _norm(config, x, layer[name]["scale"]) if name in layer else x
