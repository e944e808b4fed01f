"""How many texts a machine can generate at once: compiles the engine for it."""

import functools
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from loopjax import config as config_lib
from loopjax import program as program_lib
from loopjax.commands import document
from loopjax.errors import UserError
from loopjax.fit import measure
from loopjax.fit.measure import Attempt
from loopjax.fit.report import size
from loopjax.fit.topology import Machine
from loopjax.generate import batching, engine
from loopjax.generate.programs import cached_model as cached_model_lib
from loopjax.generate.programs import program, slots
from loopjax.program import tree_size


class Texts(NamedTuple):
  """Texts that one chip generates at once; sizes in bytes.

  Attributes:
    max_tokens: maximum length of a text.
    num_texts: number of texts that fit, 0 for none.
    cache: total size of their caches.
    decode, prefill: the programs for this many texts, or for one text if none
      fits.
  """

  max_tokens: int
  num_texts: int
  cache: int
  decode: Attempt
  prefill: Attempt

  @property
  def needed(self) -> int:
    """Memory per chip."""
    return max(self.decode.needed, self.prefill.needed)


class Model(NamedTuple):
  """The model to generate with.

  Attributes:
    cached_model: the model, with `max_tokens` 0.
    params: their shapes on the chip.
    vocab_size: V.
    prompt_chunk: tokens per prefill chunk.
    placed: sharding on the chip.
  """

  cached_model: cached_model_lib.CachedModel
  params: Any
  vocab_size: int
  prompt_chunk: int
  placed: jax.sharding.Sharding


def model_of(
  settings: config_lib.Settings, machine: Machine, dtype: str
) -> Model:
  """A config's model on the first chip of a machine.

  Raises:
    UserError: the family does not predict next tokens, or loop.kernels belong
      to another platform.
  """
  reading, chip = settings.family.reading, machine.devices[0]
  if reading is None:
    raise UserError(
      f"model.name={settings.model_name!r} does not predict next tokens and"
      " cannot generate"
    )
  placed = jax.sharding.SingleDeviceSharding(chip)
  program_lib.check_kernels(settings.loop, chip)
  graphdef, params = program_lib.abstract_model(settings)

  def stored(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    floating = jnp.issubdtype(x.dtype, jnp.floating)
    return jax.ShapeDtypeStruct(
      x.shape, dtype if floating else x.dtype, sharding=placed
    )

  cached_model = cached_model_lib.CachedModel(
    reading,
    graphdef,
    settings.eval_loops,
    max_tokens=0,
    cache_kind=reading.caches[0],
    exit_rule=cached_model_lib.default_exit_rule(reading.exits, settings.model),
    exit_kept="copy",
    platform=chip.platform,
  )
  spec = settings.spec
  *_, prompt_chunk = batching.chunk_sizes(
    reading, settings.model, spec, engine.PROMPT_CHUNK, sys.maxsize
  )
  params = jax.tree.map(stored, params)
  return Model(cached_model, params, spec.vocab_size, prompt_chunk, placed)


def measured(
  model: Model, machine: Machine, num_texts: int, max_tokens: int
) -> Texts:
  """Compiles the engine's programs for a number of texts and a length."""
  cached_model = model.cached_model._replace(max_tokens=max_tokens)
  state = _placed(
    model,
    jax.eval_shape(
      functools.partial(
        slots.empty_state,
        model=cached_model,
        num_slots=num_texts,
        vocab_size=model.vocab_size,
      ),
      model.params,
    ),
  )
  programs, decoding_params = program.of_params(
    cached_model, model.params, engine.TOKENS_PER_DISPATCH
  )
  rows = np.arange(num_texts, dtype=np.int32)
  chunks = batching.prompt_chunks(  # Only shapes matter.
    {},
    min(num_texts, engine.MAX_PREFILLS),
    min(model.prompt_chunk, max_tokens),
    num_slots=num_texts,
    num_loops=cached_model.num_loops,
  )
  has_top = _placed(model, np.bool_(False))
  shared: dict[str, Any] = {"span": max_tokens}
  with jax.sharding.use_abstract_mesh(_of_chip(machine)):
    lowered = (
      programs.decode.lower(
        decoding_params, state, _placed(model, rows), has_top, **shared,
        depth=slots.LOOPS,
      ),
      programs.prefill.lower(
        model.params, state, _placed(model, chunks), has_top, **shared
      ),
    )  # fmt: skip
  state_bytes = tree_size.num_bytes((model.params, state))
  decode, prefill = (measure.attempt(x, machine, state_bytes) for x in lowered)
  fits = max(decode.needed, prefill.needed) <= machine.memory
  return Texts(
    max_tokens,
    num_texts if fits else 0,
    tree_size.num_bytes(state.cache),
    decode,
    prefill,
  )


def most(model: Model, machine: Machine, max_tokens: int) -> Texts:
  """The number of texts that fit, by compiling for one and for a guess.

  The memory per text besides its cache comes from the last program that did not
  fit.
  """
  one = measured(model, machine, 1, max_tokens)
  if not one.num_texts:
    return one
  by_text: float = max(one.cache, 1)
  while True:
    guess = 1 + int((machine.memory - one.needed) / by_text)
    if guess == 1:
      return one
    attempt = measured(model, machine, guess, max_tokens)
    if attempt.num_texts:
      return attempt
    bytes_per_text = (attempt.needed - one.needed) / (guess - 1)
    # At least one text fewer, even if memory is not linear.
    upper_bound = (machine.memory - one.needed) / (guess - 1.5)
    by_text = max(bytes_per_text, upper_bound, by_text)


def headline(model: Model, machine: Machine) -> str:
  """Machine and model, one line."""
  return (
    f"one chip of {machine.name}, {machine.devices[0].device_kind}, with"
    f" {size(machine.memory)}; {model.cached_model.num_loops} loops,"
    f" {size(tree_size.num_bytes(model.params))} of parameters"
  )


def table(measured_texts: Sequence[Texts]) -> str:
  """Texts of every length, several lines."""
  rows = [("tokens", "texts", "cache", "decode", "prefill")]
  for texts in measured_texts:
    rows.append(
      (
        f"{texts.max_tokens:,}",
        f"{texts.num_texts:,}" if texts.num_texts else "none",
        size(texts.cache),
        size(texts.decode.needed),
        size(texts.prefill.needed),
      )
    )
  return document.aligned(rows, num_left=0)


def _of_chip(machine: Machine) -> jax.sharding.AbstractMesh:
  """A mesh without axes: the first chip, for `sharding.platform`."""
  chip = machine.devices[0]
  device = jax.sharding.AbstractDevice(
    device_kind=chip.device_kind, num_cores=None, platform=chip.platform
  )
  return jax.sharding.AbstractMesh((), (), abstract_device=device)


def _placed(model: Model, tree: Any) -> Any:
  """Shapes of arrays on the chip."""
  return jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=model.placed),
    tree,
  )
