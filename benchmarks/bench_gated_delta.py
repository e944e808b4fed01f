"""Cost of the gated delta rule token by token, by chunks, and in PyTorch.

  python benchmarks/bench_gated_delta.py
  python benchmarks/bench_gated_delta.py --part=short
  python benchmarks/bench_gated_delta.py --part=groups

`rule` times the value and the gradients for all six inputs of `gated_delta` at
one size: the token scan (the reference), the chunked form, and, if `torch` and
`transformers` are installed, Qwen3-Next's chunked form in torch with autodiff,
on all of torch's threads and on one. `short` compares the two JAX forms at few
tokens, with and without gradients, which determines `api.LONGEST_BY_TOKEN`.
`groups` varies how many chunks are computed at once, and their size. All are in
float32. Forms alternate in one process under the same conditions; only ratios
within one run are meaningful. Columns:

  ms       median of a call
  faster   speed as a multiple of the first row's
  temp     temporaries of the compiled program, in MiB
"""

import functools
import json
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from loopjax.kernels.gated_delta import chunked, gated_delta
from loopjax.run import provenance

_PART = flags.DEFINE_enum("part", "rule", ["rule", "short", "groups"], "What.")
_CALLS = flags.DEFINE_integer("calls", 9, "Timed calls of every form.")
_BATCH = flags.DEFINE_integer("batch", 1, "Sequences.")
_TOKENS = flags.DEFINE_integer("tokens", 2048, "Tokens of a sequence.")
_HEADS = flags.DEFINE_integer("heads", 8, "Heads.")
_KEY_WIDTH = flags.DEFINE_integer("key_width", 64, "d_k.")
_VALUE_WIDTH = flags.DEFINE_integer("value_width", 64, "d_v.")
_CHUNK_SIZE = flags.DEFINE_integer(
  "chunk_size", None, "Tokens of a chunk; the backend's default if not given."
)
_JSON = flags.DEFINE_string("json", None, "File to write the rows to, as JSON.")


def main(argv):
  del argv
  parts = {"rule": rule_rows, "short": short_rows, "groups": group_rows}
  rows = parts[_PART.value]()
  if _JSON.value:
    report = {"rows": rows, **provenance.environment()}
    with open(_JSON.value, "w", encoding="utf-8") as file:
      json.dump(report, file, indent=2)


def rule_rows() -> list[dict]:
  """Value and gradients of all forms at the flags' size."""
  operands = _operands(_BATCH.value, _TOKENS.value)
  forms = {}
  for name in ("reference", "chunked"):
    form = functools.partial(
      gated_delta, chunk_size=_CHUNK_SIZE.value, implementation=name
    )
    forms[name] = _compiled(form, operands, gradient=True)
  try:
    import torch

    for threads in {torch.get_num_threads(), 1}:
      forms[f"transformers, {threads} th."] = _torch(operands, threads)
  except ImportError as error:
    print(f"without torch's form: {error}")
  title = (
    f"T={_TOKENS.value:,}, {_BATCH.value} x {_HEADS.value} heads of"
    f" {_KEY_WIDTH.value} x {_VALUE_WIDTH.value}"
  )
  return _table(title, forms)


def short_rows() -> list[dict]:
  """The JAX forms at few tokens."""
  rows = []
  for batch in (1, 16):
    for num_tokens in (1, 2, 4, 8, 16):
      operands = _operands(batch, num_tokens)
      for gradient in (False, True):
        forms = {
          name: _compiled(
            functools.partial(gated_delta, implementation=name),
            operands,
            gradient,
          )
          for name in ("reference", "chunked")
        }
        what = "value and gradients" if gradient else "value"
        title = f"T={num_tokens}, {batch} x {_HEADS.value} heads: {what}"
        rows += _table(title, forms)
  return rows


def group_rows() -> list[dict]:
  """Chunks computed at once, and their size; value and gradients."""
  operands = _operands(_BATCH.value, _TOKENS.value)
  forms = {}
  for size in (32, 64, 128):
    for at_once in (1, 4, _TOKENS.value // size):
      form = functools.partial(
        chunked.gated_delta, chunk_size=size, chunks_at_once=at_once
      )
      forms[f"{at_once} of {size}"] = _compiled(form, operands, gradient=True)
  return _table(f"chunks at once, T={_TOKENS.value:,}", forms)


def _operands(batch: int, num_tokens: int) -> list[np.ndarray]:
  """query, key, value, log_decay, write, state, and two cotangents."""
  random = np.random.default_rng(0)
  heads, keys, values = _HEADS.value, _KEY_WIDTH.value, _VALUE_WIDTH.value
  lead = (batch, num_tokens, heads)
  state = (batch, heads, keys, values)
  shapes = [(*lead, keys), (*lead, keys), (*lead, values)]
  normal = [random.normal(size=x) for x in (*shapes, state, shapes[2], state)]
  query, key, value, *others = normal
  gates = -0.1 * random.uniform(size=lead), random.uniform(size=lead)
  arrays = (query, key, value, *gates, *others)
  return [x.astype(np.float32) for x in arrays]


def _compiled(form: Callable, operands: list[np.ndarray], gradient: bool):
  """(a call that waits for its results, bytes of temporaries)."""

  def projected(*operands):
    output, state = form(*operands[:6])
    return jnp.sum(operands[6] * output) + jnp.sum(operands[7] * state)

  function = (
    jax.value_and_grad(projected, tuple(range(6))) if gradient else projected
  )
  operands = [jnp.asarray(x) for x in operands]
  compiled = jax.jit(function).lower(*operands).compile()
  temporaries = compiled.memory_analysis().temp_size_in_bytes
  return lambda: jax.block_until_ready(compiled(*operands)), temporaries


def _torch(operands: list[np.ndarray], threads: int):
  """As `_compiled`, for the function in `transformers`, with None for bytes."""
  import torch
  from transformers.models.qwen3_next import modeling_qwen3_next as qwen

  # GPU kernels may have replaced it.
  rule = qwen.torch_chunk_gated_delta_rule
  rule = getattr(rule, "__wrapped__", rule)
  inputs = [torch.tensor(x, requires_grad=True) for x in operands[:6]]
  weights = [torch.tensor(x) for x in operands[6:]]

  def call():
    torch.set_num_threads(threads)
    query, key, value, log_decay, write, state = inputs
    output, after = rule(
      query,
      key,
      value,
      g=log_decay,
      beta=write,
      chunk_size=64,  # Its own default.
      initial_state=state,
      output_final_state=True,
      use_qk_l2norm_in_kernel=True,
    )
    total = (weights[0] * output).sum() + (weights[1] * after).sum()
    return total, torch.autograd.grad(total, inputs)

  return call, None


def _table(title: str, forms: dict) -> list[dict]:
  """Times the forms alternately; prints and returns one row for each."""
  seconds = {name: [] for name in forms}
  for turn in range(_CALLS.value + 1):  # The first warms up.
    for name, (call, _) in forms.items():
      call()  # Frees the previous form's memory.
      start = time.perf_counter()
      call()
      if turn:
        seconds[name].append(time.perf_counter() - start)
  print(f"\n{title}\n{'':22}{'ms':>9}{'faster':>8}{'temp':>9}")
  rows = []
  for name, (_, temporaries) in forms.items():
    row = {
      "title": title,
      "form": name,
      "ms": 1e3 * float(np.median(seconds[name])),
      "temp_bytes": temporaries,
    }
    rows.append(row)
    row["faster"] = rows[0]["ms"] / row["ms"]
    size = f"{temporaries / 2**20:9.1f}" if temporaries is not None else ""
    print(f"{name:22}{row['ms']:9.2f}{row['faster']:8.2f}{size}")
  return rows


if __name__ == "__main__":
  app.run(main)
