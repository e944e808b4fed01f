"""Transformer without loops: K stacks of blocks with separate parameters.

The untied baseline of the looped families: the same computation as
`loopjax.models.looped` with K loops, but with K copies of all parameters of a
loop, including the norm (DiscoLoop, arXiv 2607.00341, section 5.1). With K = 1
it is the plain transformer.
"""

import dataclasses
from typing import Any

import jax
from flax import nnx

from loopjax import checks
from loopjax.loop import driver
from loopjax.models import causal, every_loop, reading
from loopjax.nn import block, norm, stack
from loopjax.nn.attention.cache import Cache
from loopjax.protocols import Family, Reading
from loopjax.types import Array, LoopOptions, Output, TaskSpec

TRACES = ("hidden", "prediction", "confidence")
_WHY_NO_MORE = "a loop is a copy of the stack"


@dataclasses.dataclass(frozen=True)
class Config(causal.Config):
  """Hyper-parameters, as in `loopjax.models.looped`.

  Those of `causal.Config`, and:

  Attributes:
    num_layers: L, layers of one copy; of the model, with one copy.
    num_loops: K, number of copies of the stack; 1, no loops, unless set.
    loop_norm: "per_loop": every copy ends with its own RMS norm; "final_only":
      there is one norm, which is part of the read-out.
  """

  num_loops: int = 1
  loop_norm: str = "per_loop"

  def __post_init__(self) -> None:
    super().__post_init__()
    checks.one_of("model", self, loop_norm=causal.LOOP_NORMS)


class Model(nnx.Module):
  """K stacks of blocks in sequence."""

  embed = causal.embed
  readout_input = causal.readout_input
  logits = causal.logits
  readout_table = causal.readout_table

  def __init__(
    self,
    config: Config,
    spec: TaskSpec,
    options: LoopOptions = LoopOptions(),
    *,
    rngs: nnx.Rngs,
  ):
    self.config, self.spec, self.options = config, spec, options
    num_layers = config.num_loops * config.num_layers
    self.token_embedding = causal.token_embedding(config, spec, rngs)
    self.layers = causal.layers(config, num_layers, options, rngs)
    if config.loop_norm == "per_loop":
      self.final_norm = stack.stacked(
        config.num_loops, rngs, causal.final_norm, config
      )
    else:
      self.final_norm = causal.final_norm(config, rngs)

  def __call__(
    self,
    inputs: Array,
    *,
    num_loops: int | None = None,
    kind: driver.Kind | None = None,
    trace: tuple[str, ...] = (),
    documents: Array | None = None,
    cache: Cache | None = None,
    valid: Array | None = None,
    keys: Array | None = None,
    targets: Array | None = None,
  ) -> Output:
    """Predicts every next token.

    Args:
      inputs, documents, cache, valid, keys: see `causal.begin`.
      num_loops: number of copies to run before the read-out; K if None.
      kind: "unroll" compiles every block separately, other kinds compile one;
        as in the model's options if None.
      trace: names from TRACES: "hidden" after every copy, f32 [K, B, T, D];
        "prediction", argmax of its read-out, i32 [K, B, T]; "confidence", the
        probability of the prediction, f32 [K, B, T].
      targets: int [B, T]; the trace then also has what `every_loop.measured`
        records after every loop, [K, B, ...].
    """
    config = self.config
    num_copies = checks.num_loops(config, num_loops, _WHY_NO_MORE)
    call = causal.begin(
      self, inputs, num_copies, kind, documents, cache, valid, keys
    )

    def step(
      carry: causal.Carry, index: Array, copy: Any, copy_norm: Any
    ) -> tuple[causal.Carry, every_loop.Record]:
      hidden, cache = causal.run_stack(self, copy, call, carry, index)
      hidden = hidden if copy_norm is None else copy_norm(hidden)
      stats = {"hidden_norm": norm.mean_norm(hidden)}
      record = every_loop.record(
        self, trace, stats, before=carry[0], targets=targets, hidden=hidden
      )
      return (hidden, cache), record

    copies = jax.tree.map(  # [K L, ...] -> [copies, L, ...]
      lambda x: x.reshape(-1, config.num_layers, *x.shape[1:])[:num_copies],
      self.layers,
    )
    norms = None
    if config.loop_norm == "per_loop":
      norms = jax.tree.map(lambda x: x[:num_copies], self.final_norm)
    carry, records = driver.run_over(
      step,
      (self.embed(inputs, keys), cache),
      (copies, norms),
      num_copies,
      kind=call.kind,
      part=causal.STATE,
    )
    return causal.output(self, call, carry, records, num_copies)


def costs(config: Config, spec: TaskSpec, num_loops: int) -> dict[str, object]:
  """FLOPs of a forward pass on one example, by number of copies."""
  checks.num_loops(config, num_loops, _WHY_NO_MORE)
  shape = config.block_shape()
  per_copy = config.num_layers * block.flops(shape, spec.sequence_length)
  head = 2 * spec.sequence_length * config.width * spec.vocab_size
  return {"flops_per_example": block.flops_by_loop(head, per_copy, num_loops)}


FAMILY = Family(
  Config=Config,
  Model=Model,
  loss=causal.loss,
  costs=costs,
  traces=TRACES,
  reads_out_every_loop=every_loop.reads_out_every_loop,
  reading=Reading(
    caches=("per_loop",),  # Copies do not share keys and values.
    empty_cache=reading.empty_cache,
    read=reading.read,
    has_span=True,
    has_places=True,
  ),
)
