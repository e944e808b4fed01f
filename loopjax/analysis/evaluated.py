"""A trained model evaluated once on a sample: the input of all figures."""

import functools
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from loopjax import config as config_lib
from loopjax.program import step as step_lib
from loopjax.types import Dataset, Output, TaskSpec

MAX_EXAMPLES = 256
_MAX_LOGITS = 1 << 28  # Maximum number of logits on the host; 1 GiB.
_TRACES = ("prediction", "confidence", "probability", "weight", "attention")
_CHUNK = 32  # Examples per device call when whole attention maps are traced.


class EvaluatedModel(NamedTuple):
  """A trained model and its outputs on a sample of evaluation examples.

  Attributes:
    settings: the run's settings.
    graphdef: the model without its parameters.
    params: its parameters, on this process's first device.
    spec: the task's spec.
    num_memory: M, memory tokens before the sequence; 0 for none.
    batch: evaluation examples, numpy [N, ...] by name; any prefix is a fair
      sample.
    output: the model's output, with the loops of the evaluation, on the first
      `MAX_EXAMPLES` examples (fewer if rows are long and the vocabulary is
      large), with every trace that the family has; "attention" is averaged over
      examples, [K, H, S, S].
    forward: runs the model on the first examples, see `make_forward`.
    rows: rows of metrics.jsonl.
    directory: output directory; it exists.
    splits: names of the evaluation splits, indexed by "group/split" of the
      batch; empty if the task has only one.
  """

  settings: config_lib.Settings
  graphdef: nnx.GraphDef
  params: Any
  spec: TaskSpec
  num_memory: int
  batch: Mapping[str, np.ndarray]
  output: Output
  forward: Callable[..., Output]
  rows: list[dict[str, Any]]
  directory: pathlib.Path
  splits: tuple[str, ...] = ()


def evaluate_model(
  settings: config_lib.Settings,
  graphdef: nnx.GraphDef,
  params: Any,
  dataset: Dataset,
  rows: list[dict[str, Any]],
  directory: pathlib.Path,
) -> EvaluatedModel:
  """Runs the model once.

  This process must hold every parameter as a whole. The output directory is
  created if missing.
  """
  directory.mkdir(parents=True, exist_ok=True)
  num_memory_of = settings.family.num_memory_tokens
  num_examples = settings.eval.depth_examples
  batch = sample(dataset, num_examples and max(num_examples, MAX_EXAMPLES))
  params = on_one_device(params)
  forward = make_forward(settings, graphdef, params, batch)
  return EvaluatedModel(
    settings=settings,
    graphdef=graphdef,
    params=params,
    spec=settings.spec,
    num_memory=num_memory_of(settings.model) if num_memory_of else 0,
    batch=batch,
    output=forward(
      tuple(name for name in _TRACES if name in settings.family.traces),
      averaged=("attention",),
      num_examples=max_examples(settings.spec),
    ),
    forward=forward,
    rows=rows,
    directory=directory,
    splits=tuple(dataset.groups.get("split", ())),
  )


def on_one_device(params: Any) -> Any:
  """The arrays on the first local device; copies only those elsewhere.

  This process must hold all of each of them.
  """
  device = jax.local_devices()[0]

  def placed(x: Any) -> jax.Array:
    if isinstance(x, jax.Array) and x.devices() == {device}:
      return x
    return jax.device_put(jax.device_get(x), device)

  return jax.tree.map(placed, params)


def max_examples(spec: TaskSpec) -> int:
  """The number of examples whose logits fit into host memory."""
  of_one = spec.sequence_length * spec.vocab_size
  return min(MAX_EXAMPLES, max(_MAX_LOGITS // of_one, 1))


def sample(dataset: Dataset, num_examples: int) -> dict[str, np.ndarray]:
  """The first examples of a split, all of them valid; 0 for all examples.

  Tasks shuffle the evaluation split: these are a fair sample.

  Returns:
    Numpy arrays [N, ...] by name.
  """
  size = len(dataset.batches[0]["valid"])
  num_batches = -(-num_examples // size) or None
  indices = range(len(dataset.batches))[:num_batches]
  batches = [dataset.batches[index] for index in indices]
  batch = {
    name: np.concatenate([np.asarray(part[name]) for part in batches])
    for name in batches[0]
  }
  rows = np.flatnonzero(batch["valid"])[: num_examples or None]
  return {name: value[rows] for name, value in batch.items()}


class Halves(NamedTuple):
  """A text in two parts, token ids; only the second may be empty."""

  prompt: tuple[int, ...]
  rest: tuple[int, ...]


def first_document(
  batch: Mapping[str, np.ndarray], num_tokens: int
) -> np.ndarray:
  """Mask of each row's first document, without padding, bool [N, T].

  Arguments as in `halves`.
  """
  is_text = batch["inputs"] < num_tokens
  if "documents" in batch:
    is_text &= batch["documents"] == batch["documents"][:, :1]
  return is_text


def halves(
  batch: Mapping[str, np.ndarray], max_prompt: int, num_tokens: int
) -> list[Halves]:
  """The first document of each row, divided in the middle.

  Args:
    batch: evaluation examples, "inputs" [N, T] and, if rows have several
      documents, their numbers, "documents" [N, T].
    max_prompt: maximum length of a prompt.
    num_tokens: number of token ids; larger ones are padding. Rows of padding
      are skipped.
  """
  is_text = first_document(batch, num_tokens)
  results = []
  for row, kept in zip(batch["inputs"], is_text, strict=True):
    text = tuple(row[kept].tolist())
    if text:
      length = min(max(len(text) // 2, 1), max_prompt)
      results.append(Halves(text[:length], text[length:]))
  return results


def in_batches(
  function: Callable[[Any], Any], rows: Any, size: int, axis: int = 0
) -> Any:
  """Calls a function on batches of rows and concatenates the results.

  The last batch is padded with the first rows: one compiled program serves all.
  `rows` are arrays of N rows; those of the results are along `axis`.
  """
  number = len(jax.tree.leaves(rows)[0])
  parts = []
  for start in range(0, number, size):
    indices = np.arange(start, start + size) % number
    batch = jax.tree.map(lambda x, indices=indices: x[indices], rows)
    parts.append(jax.device_get(function(batch)))
  joined = jax.tree.map(lambda *x: np.concatenate(x, axis=axis), *parts)
  return jax.tree.map(lambda x: np.take(x, range(number), axis=axis), joined)


def make_forward(
  settings: config_lib.Settings,
  graphdef: nnx.GraphDef,
  params: Any,
  batch: Mapping[str, np.ndarray],
) -> Callable[..., Output]:
  """Compiles a forward pass that records traces.

  Returns:
    forward(trace=(), *, averaged=(), num_loops=None, num_examples=None,
    **extra): an `Output` of numpy arrays for the first `num_examples` examples
    (all if None) with `num_loops` loops (those of the evaluation if None);
    `extra` are family-specific numeric arguments. Traces named in `averaged`
    are averaged over examples on the device, [K, ...] instead of [K, B, ...].
    `losses` and `loops` are empty: they would be means over chunks.
  """
  device = jax.local_devices()[0]
  inputs = step_lib.model_inputs(batch)

  @functools.partial(jax.jit, static_argnums=(4, 5, 6))
  def run(params, inputs, counted, extra, trace, averaged, num_loops):
    model = nnx.merge(graphdef, params)
    output = model(**inputs, num_loops=num_loops, trace=trace, **extra)
    traces = {
      name: jnp.einsum("b,rb...->r...", counted, value)
      if name in averaged
      else value
      for name, value in output.trace.items()
    }
    return output.logits, output.stats, traces

  def forward(
    trace=(), *, averaged=(), num_loops=None, num_examples=None, **extra
  ):
    num_loops = num_loops or settings.eval_loops
    rows = {name: x[:num_examples] for name, x in inputs.items()}
    num_rows = len(rows["inputs"])
    extra = {name: np.float32(value) for name, value in extra.items()}
    large = {"attention", "hidden"}.intersection(trace)
    size = min(_CHUNK if large else settings.eval.batch_size, num_rows)
    chunks = []
    for start in range(0, num_rows, size):
      indices = start + np.arange(size)  # Padded: one program for all chunks.
      counted = (indices < num_rows) / num_rows
      chunk = {name: x[indices % num_rows] for name, x in rows.items()}
      args = jax.device_put((chunk, counted.astype(np.float32), extra), device)
      parts = run(params, *args, trace, averaged, num_loops)
      chunks.append(jax.device_get(parts))
    return _join(chunks, num_rows, averaged)

  return forward


def _join(chunks, num_examples: int, averaged: tuple[str, ...]) -> Output:
  """Concatenates the chunks' outputs, without the padding of the last."""
  logits, stats, traces = zip(*chunks, strict=True)

  def join(parts, axis=0):
    whole = np.concatenate(parts, axis=axis)
    return np.take(whole, np.arange(num_examples), axis=axis)

  def join_trace(name):
    parts = [part[name] for part in traces]
    # Chunks are already weighted by their fraction of the examples.
    return np.sum(parts, axis=0) if name in averaged else join(parts, axis=1)

  return Output(
    logits=join(logits),
    losses={},
    stats={name: join([part[name] for part in stats]) for name in stats[0]},
    loops={},
    trace={name: join_trace(name) for name in traces[0]},
  )
