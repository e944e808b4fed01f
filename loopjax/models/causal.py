"""Code that causal families share, apart from the algorithms of their papers.

The constructors of their parameters, and the code around the loops of `looped`,
`disco`, `ponderlm` and `transformer`, which apply a stack of blocks: the checks
and attention metadata of a call (`begin`), the stack in one loop (`run_stack`),
and the output; `every_loop` has the records of loops. Functions whose first
argument is a model are used as methods: `logits = causal.logits` in its class.
"""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import nnx

from loopjax import checks
from loopjax.kernels import KERNELS
from loopjax.loop import driver
from loopjax.losses import tokens as token_losses
from loopjax.models.every_loop import Record
from loopjax.nn import attention, block, linear, stack
from loopjax.nn.attention import cache as cache_lib
from loopjax.nn.attention.cache import Cache
from loopjax.nn.keys import by_example, dropout, fold_in
from loopjax.protocols import AnyTeacher
from loopjax.types import (
  PRECISIONS,
  Array,
  Batch,
  LoopOptions,
  Metrics,
  Output,
  TaskSpec,
)

Carry = tuple[Array, Cache | None]  # The residual stream, and the cache.
# The final norm: also after every loop, or only before the read-out.
LOOP_NORMS = ("per_loop", "final_only")
# The residual stream is the state, "hidden" [B, T, D]; a cache is not.
STATE = driver.Part(
  lambda carry: {"hidden": carry[0]},
  lambda carry, state: (state["hidden"], *carry[1:]),
)


@dataclasses.dataclass(frozen=True)
class Config(stack.StackConfig):
  """The settings of a stack and of its loops; configs of families extend it.

  Attributes:
    norm_order: RMS norms of a block, "pre" or "branch", see
      `stack.NORM_ORDERS`.
    num_loops: K, number of loops in training.
    dropout: dropout rate on embeddings and on the outputs of attention and MLP,
      in training.
  """

  norm_order: str = "pre"
  num_loops: int = checks.setting(2, least=1)
  dropout: float = 0.0

  def __post_init__(self) -> None:
    super().__post_init__()
    checks.one_of("model", self, norm_order=stack.INNER_NORMS)


def token_embedding(config: Any, spec: TaskSpec, rngs: nnx.Rngs) -> nnx.Embed:
  """The embedding table W, [V, D]."""
  options = matrix_options(config, rngs)
  return linear.embedding(spec.vocab_size, config.width, **options)


def layers(
  config: Any, num_layers: int, options: LoopOptions, rngs: nnx.Rngs
) -> block.Block:
  """Stacked blocks, see `stack.stacked`."""
  return stack.stacked(
    num_layers,
    rngs,
    block.Block,
    config.block_shape(),
    kernels=KERNELS[options.kernels],
    precision=PRECISIONS[config.precision],
  )


def final_norm(config: Any, rngs: nnx.Rngs) -> Any:
  """The norm after the last block, of the same kind as its input norms."""
  precision = PRECISIONS[config.precision]
  norm = config.block_shape().norm
  return norm(config.width, precision=precision, rngs=rngs)


def head(config: Any, spec: TaskSpec, rngs: nnx.Rngs) -> nnx.Linear:
  """The output matrix of a model whose embedding is not tied, [D, V]."""
  options = matrix_options(config, rngs)
  return linear.linear(config.width, spec.vocab_size, **options)


def exit_gate(config: Any, rngs: nnx.Rngs) -> nnx.Linear:
  """The exit gate of Ouro (arXiv 2510.25741), [D, 1], with a bias."""
  return linear.readout(config.width, 1, **matrix_options(config, rngs))


def matrix_options(config: Any, rngs: nnx.Rngs) -> dict[str, Any]:
  """What the constructors of all matrices of a model take."""
  return {
    "init": nnx.initializers.normal(config.init_std),
    "precision": PRECISIONS[config.precision],
    "rngs": rngs,
  }


class Call(NamedTuple):
  """The arguments that all loops of a call share.

  Attributes:
    num_loops: K.
    kind: how the loop is executed, see `loop.driver.run_loop`.
    metadata: positions and masks of the tokens.
    keys: random keys of dropout, [B]; None for no dropout.
  """

  num_loops: int
  kind: driver.Kind
  metadata: attention.Metadata
  keys: Array | None


def begin(
  model: Any,
  inputs: Array,
  num_loops: int | None = None,
  kind: driver.Kind | None = None,
  documents: Array | None = None,
  cache: Cache | None = None,
  valid: Array | None = None,
  keys: Array | None = None,
) -> Call:
  """Checks the arguments of a model's `__call__`, and makes its `Call`.

  Args:
    model: the model.
    inputs: token ids [B, T]; any T. Padding must be at the end.
    num_loops: K >= 1; may differ from the number in training.
    kind: how the loop is executed; as in the model's options if None.
    documents: i32 [B, T], a number for each document of a row; tokens attend
      within their document. None if a row is one document.
    cache: cache of the tokens that precede these, or None.
    valid: bool [B, T], False for padding; only with a cache. None without
      padding.
    keys: random keys of dropout, [B]; None for no dropout, as in evaluation.
  """
  config = model.config
  num_loops = checks.num_loops(config, num_loops)
  cache_lib.check(cache, num_loops * config.num_layers)
  metadata = attention.make_metadata(
    inputs.shape,
    config.block_shape().head_width,
    config.rope_base,
    documents=documents,
    cache=cache,
    valid=valid,
    scaling=getattr(config, "rope_scaling", ()),
  )
  return Call(num_loops, kind or model.options.execution, metadata, keys)


def embed(model: Any, inputs: Array, keys: Array | None) -> Array:
  """H^0 = W[x], [B, T, D], after dropout with the keys of the call."""
  embedded = model.token_embedding(inputs)
  return dropout(embedded, model.config.dropout, fold_in(keys, 0))


def run_stack(
  model: Any, layers: Any, call: Call, carry: Carry, loop: Array | int
) -> Carry:
  """Applies the blocks once, in a loop whose index counts from 0.

  Rematerialisation is per layer: the inputs of all K L layers take less memory
  than the activations of the L layers of one loop.
  """
  return stack.run_layers(
    layers,
    *carry,
    call.metadata,
    first_slot=loop * model.config.num_layers,
    keys=fold_in(call.keys, loop + 1),
    unroll=call.kind == "unroll",
    remat=model.options.remat,
  )


def transform(model: Any, call: Call, carry: Carry, loop: Array | int) -> Carry:
  """f_theta in a loop: the stack and, if "per_loop", the norm."""
  hidden, cache = run_stack(model, model.layers, call, carry, loop)
  ends_in_norm = model.config.loop_norm == "per_loop"
  return model.final_norm(hidden) if ends_in_norm else hidden, cache


def readout_input(model: Any, hidden: Array) -> Array:
  """The state after a loop, after its norm: f32 [B, T, D]."""
  if model.config.loop_norm == "per_loop":
    return hidden  # The loop ends with a norm.
  return model.final_norm(hidden)


def logits(model: Any, hidden: Array) -> Array:
  """Logits f32 [B, T, V] of the state after a loop [B, T, D]."""
  return linear.token_logits(
    model.readout_input(hidden),
    model.readout_table(),
    model.spec.num_padding_tokens,
  )


def readout_table(model: Any) -> Array:
  """W [V, D], one row per token; logits are h W^T."""
  if hasattr(model, "head"):
    return model.head.kernel[...].T
  return model.token_embedding.embedding[...]


def output(
  model: Any, call: Call, carry: Carry, records: Record, loops_run: Array | int
) -> Output:
  """The output of a call.

  Args:
    model: the model.
    call: from `begin`.
    carry: the carry after the last loop.
    records: the records of all loops.
    loops_run: number of loops.
  """
  hidden, cache = carry
  loops, traces = records
  return Output(
    logits=model.logits(hidden),
    losses={},
    stats={"loops_run": jnp.full(len(hidden), loops_run, jnp.float32)},
    loops=loops,
    trace=traces,
    hidden=model.readout_input(hidden),
    cache=cache and cache.extended(call.metadata.places),
  )


def loss(
  model: Any, batch: Batch, key: Array, step: Array, teacher: AnyTeacher
) -> tuple[Array, Metrics]:
  """Cross-entropy after the last loop, weighted by token.

  Returns:
    (f32 scalar, metrics: scalars and per-loop vectors by name).
  """
  del step, teacher  # No schedule, no teacher.
  documents = batch.get("documents")
  keys = by_example(key, batch)
  output = model(batch["inputs"], documents=documents, keys=keys)
  return token_losses.output_loss(model, output, batch)
