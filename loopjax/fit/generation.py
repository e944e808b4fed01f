"""How many texts a machine can write at once: the engine, compiled for it."""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from loopjax import config as config_lib
from loopjax import program as program_lib
from loopjax.errors import UserError
from loopjax.fit import measure
from loopjax.fit.measure import Attempt
from loopjax.fit.report import size
from loopjax.fit.topology import Machine
from loopjax.generate import engine, program, sampling
from loopjax.models import CAUSAL
from loopjax.protocols import ExitsEarly

_STEPS, _PART = 8, 256  # Of a call, as the engine's.


class Texts(NamedTuple):
  """Texts that one chip writes at once; sizes in bytes.

  Attributes:
    max_tokens: of a text. num_texts: that fit, 0 for none.
    cache: of all of them.
    decode, prefill: the programs of so many texts, of one if none fits.
  """

  max_tokens: int
  num_texts: int
  cache: int
  decode: Attempt
  prefill: Attempt

  @property
  def needed(self) -> int:
    """Memory of a chip."""
    return max(self.decode.needed, self.prefill.needed)


class Model(NamedTuple):
  """What is generated with.

  Attributes:
    reader: without a number of tokens. params: their shapes on the chip.
    vocab_size: V. placed: on the chip.
  """

  reader: program.Reader
  params: Any
  vocab_size: int
  placed: jax.sharding.Sharding


def model_of(
  settings: config_lib.Settings, machine: Machine, dtype: str
) -> Model:
  """A config's model on the first chip of a machine.

  Args:
    settings: of the config.
    machine: the machine.
    dtype: of the parameters.

  Raises:
    UserError: the family does not predict next tokens.
  """
  name = settings.plain["model"]["name"]
  if name not in CAUSAL:
    raise UserError(
      f"model.name={name!r} does not predict next tokens, so it cannot generate"
    )
  family, chip = CAUSAL[name], machine.devices[0]
  placed = jax.sharding.SingleDeviceSharding(chip)
  graphdef, params = program_lib.abstract_model(settings)
  rule = "fixed"
  if isinstance(family, ExitsEarly):
    rule = family.exit_rule(settings.model)

  def stored(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    floating = jnp.issubdtype(x.dtype, jnp.floating)
    return jax.ShapeDtypeStruct(
      x.shape, dtype if floating else x.dtype, sharding=placed
    )

  reader = program.Reader(
    family,
    graphdef,
    settings.eval_loops,
    max_tokens=0,
    prompt_tokens=0,
    kind=family.CACHES[0],
    rule=rule,
    kept="copy",
    platform=chip.platform,
  )
  return Model(
    reader, jax.tree.map(stored, params), settings.spec.vocab_size, placed
  )


def measured(
  model: Model, machine: Machine, num_texts: int, max_tokens: int
) -> Texts:
  """Compiles what the engine runs, for so many texts of so many tokens."""
  reader = model.reader._replace(max_tokens=max_tokens)
  state = _placed(
    model,
    jax.eval_shape(
      functools.partial(
        program.empty_state,
        reader=reader,
        num_slots=num_texts,
        vocab_size=model.vocab_size,
      ),
      model.params,
    ),
  )
  programs = program.programs(reader, reader.batch_axes(model.params), _STEPS)
  kept = np.ones(num_texts, bool)
  num_prompts = min(num_texts, engine.MOST_PROMPTS)
  prompts = _placed(model, _prompts(num_prompts, min(_PART, max_tokens)))
  shared: dict[str, Any] = {"num_top": 0, "span": max_tokens}
  lowered = (
    programs.decode.lower(
      model.params, state, _placed(model, kept), **shared, early=False
    ),
    programs.prefill.lower(model.params, state, prompts, **shared),
  )  # fmt: skip
  held = num_bytes((model.params, state))
  decode, prefill = (measure.attempt(x, machine, held) for x in lowered)
  fits = max(decode.needed, prefill.needed) <= machine.memory
  return Texts(
    max_tokens,
    num_texts if fits else 0,
    num_bytes(state.cache),
    decode,
    prefill,
  )


def most(model: Model, machine: Machine, max_tokens: int) -> Texts:
  """As many texts as fit, by compiling for one, and for a guess.

  What a text needs beside its cache is taken from the last program that did
  not fit.
  """
  one = measured(model, machine, 1, max_tokens)
  if not one.num_texts:
    return one
  by_text: float = max(one.cache, 1)
  while True:
    guess = 1 + int((machine.memory - one.needed) / by_text)
    if guess == 1:
      return one
    found = measured(model, machine, guess, max_tokens)
    if found.num_texts:
      return found
    more = (found.needed - one.needed) / (guess - 1)
    # At least one text less, even if memory does not grow in a line.
    least = (machine.memory - one.needed) / (guess - 1.5)
    by_text = max(more, least, by_text)


def num_bytes(tree: Any) -> int:
  """Of arrays, or of their shapes."""
  return sum(
    math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree)
  )


def headline(model: Model, machine: Machine) -> str:
  """Machine and model, one line."""
  reader = model.reader
  return (
    f"one chip of {machine.name}, {machine.devices[0].device_kind}, with"
    f" {size(machine.memory)}; {reader.num_loops} loops,"
    f" {size(num_bytes(model.params))} of parameters"
  )


def table(found: Sequence[Texts]) -> str:
  """Texts of every length, several lines."""
  rows = [("tokens", "texts", "cache", "decode", "prefill")]
  for texts in found:
    rows.append(
      (
        f"{texts.max_tokens:,}",
        f"{texts.num_texts:,}" if texts.num_texts else "none",
        size(texts.cache),
        size(texts.decode.needed),
        size(texts.prefill.needed),
      )
    )
  widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
  return "\n".join(
    "  ".join(
      cell.rjust(width) for cell, width in zip(row, widths, strict=True)
    )
    for row in rows
  )


def _prompts(num: int, length: int) -> program.Prompts:
  """Parts of prompts, of which only the shapes count."""
  nothing = np.zeros(num, np.int32)
  return program.Prompts(
    tokens=np.zeros((num, length), np.int32),
    valid=np.zeros((num, length), bool),
    slots=nothing,
    is_first=nothing.astype(bool),
    is_last=nothing.astype(bool),
    rows=program.Rows(
      token=nothing,
      place=nothing,
      left=nothing,
      seen=np.zeros((num, 0), bool),
      stops=np.zeros((num, program.MAX_STOPS), np.int32),
      sampling=sampling.rows([sampling.Sampling()] * num),
      num_loops=nothing,
      exit_threshold=np.ones(num, np.float32),
    ),
  )


def _placed(model: Model, tree: Any) -> Any:
  """Shapes of arrays on the chip."""
  return jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=model.placed),
    tree,
  )
