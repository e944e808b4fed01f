"""The pieces of transformers in NumPy, of which tests build their oracles."""

import jax
import numpy as np


def in_float64(params):
  """A pytree of arrays as NumPy arrays."""
  return jax.tree.map(lambda x: np.asarray(x, np.float64), params)


def layer_of(params, index):
  """One layer's parameters, of a pytree of stacked ones."""
  return jax.tree.map(lambda x: x[index], params)


def sigmoid(x):
  return 1 / (1 + np.exp(-x))


def silu(x):
  return x * sigmoid(x)


def gelu(x):
  inner = np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)
  return 0.5 * x * (1 + np.tanh(inner))


def softmax(x):
  x = np.exp(x - x.max(-1, keepdims=True))
  return x / x.sum(-1, keepdims=True)


def rms_normed(x, epsilon=1e-6):
  return x / np.sqrt(np.mean(x**2, -1, keepdims=True) + epsilon)


def rotated(x, position, base):
  """x [..., d] of a token at a position, in the half-split layout."""
  first, second = np.split(x, 2, axis=-1)
  half = first.shape[-1]
  angles = position * base ** (-np.arange(half) / half)
  turned = (first + 1j * second) * np.exp(1j * angles)
  return np.concatenate([turned.real, turned.imag], axis=-1)


def attended(query, rows):
  """One token's [H, d] for all rows (key, value), which groups of heads share.

  Args:
    query: [H, d].
    rows: keys and values [groups, d].
  """
  keys, values = (
    np.repeat(x, len(query) // len(x[0]), axis=1)
    for x in map(np.array, zip(*rows, strict=True))
  )
  scores = np.einsum("hd,shd->hs", query, keys) / query.shape[-1] ** 0.5
  return np.einsum("hs,shd->hd", softmax(scores), values)


def attention(x, params, num_heads, base):
  """Causal attention of x [T, D], token by token."""
  query, key, value = (
    (x @ params[name]["kernel"]).reshape(len(x), num_heads, -1)
    for name in ("query", "key", "value")
  )
  rows, mixed = [], []
  for t in range(len(x)):
    rows.append((rotated(key[t], t, base), value[t]))
    mixed.append(attended(rotated(query[t], t, base), rows))
  return np.reshape(mixed, x.shape) @ params["output"]["kernel"]


def swiglu(x, params):
  """The gated MLP."""
  gate, value = (x @ params[name]["kernel"] for name in ("gate", "value"))
  return silu(gate) * value @ params["output"]["kernel"]


def gelu_mlp(x, params):
  return gelu(x @ params["value"]["kernel"]) @ params["output"]["kernel"]
