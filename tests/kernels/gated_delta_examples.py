"""Hard inputs for a gated delta rule, and the rule in NumPy."""

import jax
import numpy as np
import tests_support

FAST = {"xla_backend_optimization_level": 0}
KEY_HEADS, NUM_HEADS, KEY_WIDTH, VALUE_WIDTH = 2, 4, 8, 6
SHAPES = (  # Query, key, value, log_decay, write; after [B, T].
  (KEY_HEADS, KEY_WIDTH),
  (KEY_HEADS, KEY_WIDTH),
  (NUM_HEADS, VALUE_WIDTH),
  (NUM_HEADS,),
  (NUM_HEADS,),
)
# Examples of one batch.
EXAMPLES = (
  "random",
  "equal keys, write gates up to 2",
  "decay gates of 0 and 1, write gates of 0 and 1",
  "strong decays, then weak ones",
  "zeros among the keys, decay gates of exactly 0",
)


def arrays(num_tokens, dtype=np.float64):
  """query, key, value, log_decay, write and state; one of each of EXAMPLES."""
  random = np.random.default_rng(num_tokens)
  lead = (len(EXAMPLES), num_tokens)
  query, key, value = (random.normal(size=(*lead, *s)) for s in SHAPES[:3])
  gates = (*lead, NUM_HEADS)
  log_decay = -0.3 * random.uniform(size=gates)
  write = random.uniform(size=gates)
  key[1] = key[1, :1]
  write[1] *= 2
  log_decay[1] *= 0.1
  log_decay[2] = random.choice([0.0, -1e3], size=gates[1:], p=[0.9, 0.1])
  write[2] = random.choice([0.0, 1.0], size=gates[1:])
  log_decay[3, : num_tokens // 2] = -90.0 * random.uniform(
    size=(num_tokens // 2, NUM_HEADS)
  )
  key[4, ::2] = 0.0
  query[4, ::3] = 0.0
  log_decay[4] = np.where(
    random.uniform(size=gates[1:]) < 0.1, -np.inf, log_decay[4]
  )
  state = random.normal(size=(lead[0], NUM_HEADS, KEY_WIDTH, VALUE_WIDTH))
  operands = (query, key, value, log_decay, write, state)
  return [x.astype(dtype) for x in operands]


def recurrence(query, key, value, log_decay, write, state):
  """Outputs and last state, in float64, token by token and head by head."""
  operands = (query, key, value, log_decay, write, state)
  query, key, value, log_decay, write, state = (
    np.asarray(x, np.float64) for x in operands
  )
  output, state = np.zeros(value.shape), state.copy()
  repeats = value.shape[2] // key.shape[2]
  for b, t, h in np.ndindex(value.shape[:3]):
    q, k = query[b, t, h // repeats], key[b, t, h // repeats]
    q = q / np.sqrt(q @ q + 1e-6) / np.sqrt(len(q))
    k = k / np.sqrt(k @ k + 1e-6)
    memory = np.exp(log_decay[b, t, h]) * state[b, h]
    error = value[b, t, h] - k @ memory
    state[b, h] = memory + write[b, t, h] * np.outer(k, error)
    output[b, t, h] = q @ state[b, h]
  return output, state


def assert_rounded(actual, expected, roundings):
  """As in `tests_support`, for every example of every array."""
  tests_support.assert_rounded(*_by_example(actual, expected), roundings)


def assert_close(actual, expected, tolerance):
  """As in `tests_support`, for every example of every array."""
  tests_support.assert_close(*_by_example(actual, expected), tolerance)


def _by_example(*trees):
  return [
    [list(np.asarray(x, np.float64)) for x in jax.tree.leaves(tree)]
    for tree in trees
  ]
