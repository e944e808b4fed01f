"""Loops that share the first one's keys, in NumPy and float64, token by token.

After arXiv 2510.24824: every token is read through all loops before the next
one, and each layer keeps lists of keys and values.
"""

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


def logits_of_loops(params, config, tokens, num_loops):
  """Logits after every loop for one row of tokens, [K, T, V]."""
  params = in_float64(params)
  layers = [layer_of(params["layers"], n) for n in range(config.num_layers)]
  gates = [
    layer_of(params["window_gates"], n) for n in range(config.num_layers)
  ]
  table = params["token_embedding"]["embedding"]
  out = params["head"]["kernel"] if "head" in params else table.T
  kept = {}  # (loop, layer) -> the keys and values of the tokens so far.
  found = []
  for place, token in enumerate(tokens):
    x, ends = table[token], []
    for loop in range(num_loops):
      for n, (layer, gate) in enumerate(zip(layers, gates, strict=True)):
        x = _layer(config, layer, gate, x, place, loop, n, kept)
      normed = _norm(config, x, params["final_norm"]["scale"])
      ends.append(normed @ out)
      if config.loop_norm == "per_loop":
        x = normed
    found.append(ends)
  return np.swapaxes(np.array(found), 0, 1)


def _layer(config, layer, gate, x, place, loop, n, kept):
  maps, shape = layer["attention"], config.block_shape()
  normed = _norm(config, x, layer["attention_norm"]["scale"])

  def heads(name, turned):
    y = normed @ maps[name]["kernel"] + maps[name].get("bias", 0)
    y = y.reshape(-1, shape.head_width)
    if turned and f"{name}_norm" in maps:
      y = _norm(config, y, maps[f"{name}_norm"]["scale"])
    return rotated(y, place, config.rope_base) if turned else y

  query, key, value = heads("query", 1), heads("key", 1), heads("value", 0)
  kept.setdefault((loop, n), []).append((key, value))
  mixed = attended(query, kept[0, n])
  if loop:
    share = sigmoid(np.sum(gate["weight"] * query, axis=1) + gate["bias"])
    local = attended(query, kept[loop, n][-config.window :])
    mixed = share[:, None] * mixed + (1 - share[:, None]) * local
  x = x + mixed.ravel() @ maps["output"]["kernel"]
  inner = _norm(config, x, layer["mlp_norm"]["scale"])
  return x + swiglu(inner, layer["mlp"])


def _norm(config, x, gain):
  return rms_normed(x, config.norm_epsilon) * gain
