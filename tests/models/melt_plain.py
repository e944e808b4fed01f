"""MELT's definition in NumPy and float64, token by token and head by head."""

import numpy as np


def _norm(config, x, gain):
  mean = np.mean(x**2, axis=-1, keepdims=True)
  return x / np.sqrt(mean + config.norm_epsilon) * gain


def _sigmoid(x):
  return 1 / (1 + np.exp(-x))


def _rotated(x, place, base):
  """Rotates x [heads, d_h] at a position."""
  half = x.shape[-1] // 2
  angle = place * base ** (-np.arange(half) / half)
  first, second = x[:, :half], x[:, half:]
  return np.concatenate(
    [
      first * np.cos(angle) - second * np.sin(angle),
      second * np.cos(angle) + first * np.sin(angle),
    ],
    axis=1,
  )


def _keep(config, gate, loop, x, latent):
  """z after the first loop; `loop` counts from 0."""
  fixed = {"mean": loop / (loop + 1), "ema": 0.2, "last": 0.0, "first": 1.0}
  if config.gate in fixed:
    return fixed[config.gate]
  return _sigmoid(
    x @ gate["input"]["kernel"]
    + latent @ gate["latent"]["kernel"]
    + gate["bias"]
  )


def hidden_of_loops(params, config, tokens, chunk, alpha=1.0):
  """The output of every loop for one row of tokens: [K, T, D]."""
  params = _wide(params)
  layers, gates = params["layers"], params.get("latent_gates", {})
  per_layer = range(config.num_layers)
  layers = [_of(layers, n) for n in per_layer]
  gates = [_of(gates, n) for n in per_layer]
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
      key = [_rotated(k, p, base) for k, p in zip(key, places, strict=True)]
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
          _attended(_rotated(query[i], place, config.rope_base),
                    seen + own[: i + 1])
          for i, place in enumerate(places)
        ]  # fmt: skip
        mixed = np.stack(mixed) @ layer["attention"]["output"]["kernel"]
        x = x + _post(config, layer, "attention_post_norm", mixed)
        inner = _norm(config, x, layer["mlp_norm"]["scale"])
        opened = inner @ layer["mlp"]["gate"]["kernel"]
        opened = (
          opened * _sigmoid(opened) * (inner @ layer["mlp"]["value"]["kernel"])
        )
        x = x + _post(
          config,
          layer,
          "mlp_post_norm",
          opened @ layer["mlp"]["output"]["kernel"],
        )
      x = _norm(config, x, params["final_norm"]["scale"])
      ends.append(x)
    for loop, n in inputs:
      mixture = alpha * latents[n] + (1 - alpha) * inputs[loop, n]
      final.setdefault((loop, n), []).extend(rows(layers[n], mixture))
    outputs.append(np.stack(ends))
  return np.concatenate(outputs, axis=1)


_KV = ("key", "value")


def _attended(query, rows):
  """Attention [heads d_h] of a query [heads, d_h] to the visible keys."""
  mixed = []
  for number, q in enumerate(query):
    group = number * len(rows[0][0]) // len(query)
    logits = np.array([key[group] @ q for key, _ in rows]) / len(q) ** 0.5
    weights = np.exp(logits - logits.max())
    values = np.stack([value[group] for _, value in rows])
    mixed.append(weights / weights.sum() @ values)
  return np.concatenate(mixed)


def _post(config, layer, name, x):
  return _norm(config, x, layer[name]["scale"]) if name in layer else x


def _wide(tree):
  if isinstance(tree, dict):
    return {name: _wide(part) for name, part in tree.items()}
  return np.asarray(tree, np.float64)


def _of(tree, number):
  """One layer's parameters."""
  if isinstance(tree, dict):
    return {name: _of(part, number) for name, part in tree.items()}
  return tree[number]
