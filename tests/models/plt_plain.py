"""Loops that share the first one's keys, in NumPy and float64, token by token.

After arXiv 2510.24824: every token is read through all loops before the next
one, and each layer keeps lists of keys and values.
"""

import numpy as np


def logits_of_loops(params, config, tokens, num_loops):
  """Logits after every loop for one row of tokens, [K, T, V]."""
  params = _wide(params)
  layers = [_of(params["layers"], n) for n in range(config.num_layers)]
  gates = [_of(params["window_gates"], n) for n in range(config.num_layers)]
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
    return _rotated(y, place, config.rope_base) if turned else y

  query, key, value = heads("query", 1), heads("key", 1), heads("value", 0)
  kept.setdefault((loop, n), []).append((key, value))
  mixed = []
  for h, q in enumerate(query):
    group = h // (shape.num_heads // shape.num_key_value_heads)
    y = _attended(q, group, kept[0, n])
    if loop:
      share = _sigmoid(gate["weight"][h] @ q + gate["bias"][h])
      local = _attended(q, group, kept[loop, n][-config.window :])
      y = share * y + (1 - share) * local
    mixed.append(y)
  x = x + np.concatenate(mixed) @ maps["output"]["kernel"]
  inner = _norm(config, x, layer["mlp_norm"]["scale"])
  opened = inner @ layer["mlp"]["gate"]["kernel"]
  opened = opened * _sigmoid(opened) * (inner @ layer["mlp"]["value"]["kernel"])
  return x + opened @ layer["mlp"]["output"]["kernel"]


def _attended(query, group, rows):
  """A query [d_h] to all keys and values of the list."""
  scores = np.array([key[group] @ query for key, _ in rows])
  weights = np.exp((scores - scores.max()) / len(query) ** 0.5)
  values = np.stack([value[group] for _, value in rows])
  return weights / weights.sum() @ values


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


def _wide(tree):
  if isinstance(tree, dict):
    return {name: _wide(part) for name, part in tree.items()}
  return np.asarray(tree, np.float64)


def _of(tree, number):
  """One layer's parameters."""
  if isinstance(tree, dict):
    return {name: _of(part, number) for name, part in tree.items()}
  return tree[number]
