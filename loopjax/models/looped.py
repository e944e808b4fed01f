"""Looped transformer: one stack of blocks, applied K times.

Source: the vanilla recurrence of DiscoLoop (arXiv 2607.00341, equation 2):
H^0 = W[x], H^{k+1} = f_theta(H^k), logits H^K W^T; and Ouro (arXiv 2510.25741),
which is that with norms before and after each branch, a read-out of its own,
and a gate that says after each loop whether to exit.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from loopjax import checks
from loopjax.errors import UserError
from loopjax.loop import driver, exits
from loopjax.losses import exits as exit_losses
from loopjax.losses import tokens as token_losses
from loopjax.models.exiting import check_exits as check_exits
from loopjax.models.exiting import default_exit_rule as default_exit_rule
from loopjax.models.exiting import read as read
from loopjax.models.reading import empty_cache as empty_cache
from loopjax.models.reading import unstacked as unstacked
from loopjax.nn import attention, block, linear, norm, stack
from loopjax.nn import cache as cache_lib
from loopjax.nn.cache import Cache
from loopjax.nn.dropout import dropout, fold
from loopjax.nn.shape import Shape
from loopjax.protocols import Frozen
from loopjax.types import (
  PRECISIONS,
  Array,
  Batch,
  LoopOptions,
  Metrics,
  Output,
  TaskSpec,
)

TRACES = ("hidden", "prediction", "confidence")
CACHES = cache_lib.KINDS
HEADLINE: tuple[str, ...] = ()
EXIT_GATES = ("none", "joint", "alone", "unused")


@dataclasses.dataclass(frozen=True)
class Config:
  """Hyper-parameters; the paper states only K, the rest are GPT-2's.

  Attributes:
    width: D. num_layers: L of the stack. num_heads: H.
    num_key_value_heads: G, each read by H / G query heads; 0 for H.
    head_width: d_h; 0 for D / H.
    qk_norm: RMS norms of each head's queries and keys, before they are rotated.
    mlp: "gelu" (GPT-2), "swiglu" or "geglu". mlp_ratio: F = floor(mlp_ratio D).
    post_norm: RMS norms after attention and MLP, too (Ouro, arXiv 2510.25741).
    num_loops: K, number of loops in training.
    loop_norm: f_theta ends in an RMS norm in every loop ("per_loop", as in
      Ouro, arXiv 2510.25741), or the norm is part of the read-out
      ("final_only").
    dropout: rate on embeddings and on the outputs of attention and MLP, in
      training.
    tied: one table encodes and decodes, or the read-out is a matrix of its own.
    exit_gate: "none"; "joint", a gate that is trained with the model, on the
      expected loss over exits; "alone", on what each loop improves, with the
      model as a constant (set optim.frozen='^(?!exit_gate)' with it, so that
      weight decay leaves the model alone, too); or "unused", a gate that is
      not trained. The loss of "none" and "unused" is that after the last loop.
    entropy_weight: beta, of the entropy of the exits in "joint"; Ouro takes 0.1
      at first and 0.05 later.
    rope_base: longest wavelength over 2 pi, in tokens.
    init_std: of every matrix, the embedding table included.
    precision: "float32" or "bfloat16" (of the matrix products' inputs).
  """

  width: int = 768
  num_layers: int = 4
  num_heads: int = 12
  num_key_value_heads: int = 0
  head_width: int = 0
  qk_norm: bool = False
  mlp: str = "gelu"
  mlp_ratio: float = 4.0
  post_norm: bool = False
  num_loops: int = 2
  loop_norm: str = "per_loop"
  dropout: float = 0.0
  tied: bool = True
  exit_gate: str = "none"
  entropy_weight: float = 0.05
  rope_base: float = 10_000.0
  init_std: float = 0.02
  precision: str = "float32"

  def __post_init__(self) -> None:
    checks.plain_values("model", self)
    checks.one_of(
      "model",
      self,
      loop_norm=("per_loop", "final_only"),
      exit_gate=EXIT_GATES,
      precision=PRECISIONS,
    )
    checks.at_least("model", self, num_loops=1, entropy_weight=0)
    checks.at_least("model", self, num_layers=1, rope_base=1, init_std=0)
    if self.exit_gate != "joint":
      because = f"model.exit_gate={self.exit_gate!r}"
      checks.without_effect("model", self, because, "entropy_weight")
    if self.num_loops == 1 and self.exit_gate in ("joint", "alone"):
      raise UserError(
        f"model.exit_gate={self.exit_gate!r} needs model.num_loops of at least"
        " 2: one loop leaves nothing to choose"
      )
    self.block_shape()

  def block_shape(self) -> Shape:
    """Structure of the stack's blocks; raises UserError if it is invalid."""
    return stack.block_shape(
      width=self.width,
      num_heads=self.num_heads,
      num_key_value_heads=self.num_key_value_heads,
      head_width=self.head_width,
      qk_norm=self.qk_norm,
      mlp=self.mlp,
      mlp_ratio=self.mlp_ratio,
      post_norm=self.post_norm,
      dropout=self.dropout,
      init_std=self.init_std,
    )


# The residual stream, and the cache if there is one.
Carry = tuple[Array, Cache | None]


class Model(nnx.Module):
  """The vanilla looped transformer."""

  def __init__(
    self,
    config: Config,
    spec: TaskSpec,
    options: LoopOptions = LoopOptions(),
    *,
    rngs: nnx.Rngs,
  ):
    self.config, self.spec, self.options = config, spec, options
    shared: dict[str, Any] = {
      "precision": PRECISIONS[config.precision],
      "rngs": rngs,
    }
    init = nnx.initializers.normal(config.init_std)
    self.token_embedding = linear.embedding(
      spec.vocab_size, config.width, init=init, **shared
    )
    shape = config.block_shape()
    self.layers = stack.make_layers(shape, config.num_layers, **shared)
    self.final_norm = norm.rms_norm(config.width, **shared)
    if not config.tied:
      self.head = linear.linear(
        config.width, spec.vocab_size, init=init, **shared
      )
    if config.exit_gate != "none":
      self.exit_gate = linear.readout(config.width, 1, init=init, **shared)

  def __call__(
    self,
    inputs: Array,
    *,
    num_loops: int | None = None,
    kind: str | None = None,
    trace: tuple[str, ...] = (),
    documents: Array | None = None,
    cache: Cache | None = None,
    valid: Array | None = None,
    key: Array | None = None,
    edit: Callable[[Array, Array], Array] | None = None,
  ) -> Output:
    """Predicts every next token (equation 2).

    Args:
      inputs: token ids [B, T]; any T. Padding must be at the end.
      num_loops: K >= 1; it may differ from the trained number.
      kind: how the loop runs; the model's own options if None.
      trace: names from TRACES: "hidden" H^1 .. H^K f32 [K, B, T, D],
        "prediction" of every loop, argmax of its read-out, i32 [K, B, T], and
        "confidence", its probability, f32 [K, B, T].
      documents: i32 [B, T], a number for each document of a row, which sees no
        other; None if a row is one document.
      cache: of earlier tokens, after which these are read; None for none.
      valid: bool [B, T], which tokens are to be read after those of the cache;
        all if None.
      key: of dropout; None, as in evaluation, for none.
      edit: (H^{k+1} [B, T, D], k, i32 scalar) -> what loop k < K - 1 passes on
        instead (DiscoLoop, equation 3). Traces show H^{k+1} before the edit.
    """
    config = self.config
    num_loops = config.num_loops if num_loops is None else num_loops
    if num_loops < 1:
      raise UserError(f"num_loops={num_loops} must be at least 1")
    kind = kind or self.options.kind
    cache_lib.check(cache, num_loops * config.num_layers)
    metadata = attention.make_metadata(
      inputs.shape,
      config.block_shape().head_width,
      config.rope_base,
      documents=documents,
      cache=cache,
      valid=valid,
    )

    def step(carry: Carry, k: Array) -> tuple[Carry, dict[str, Array]]:
      hidden, cache = self.transform(carry, metadata, k, kind, fold(key, k + 1))
      record = self._record(hidden, trace)
      if edit is not None:  # H^K is read out without an edit.
        hidden = jnp.where(k < num_loops - 1, edit(hidden, k), hidden)
      return (hidden, cache), record

    (hidden, cache), records, steps_run = driver.run_loop(
      step, (self.embed(inputs, key), cache), num_loops, kind=kind
    )
    return Output(
      logits=self.logits(hidden),
      losses={},
      stats={"loops_run": jnp.full(len(inputs), steps_run, jnp.float32)},
      loops={"hidden_norm": records["hidden_norm"]},
      trace={name: records[name] for name in trace},
      hidden=self.normed(hidden),
      cache=cache and cache.extended(metadata.places),
    )

  def embed(self, inputs: Array, key: Array | None) -> Array:
    """H^0 = W[x], [B, T, D]."""
    rate = self.config.dropout
    return dropout(self.token_embedding(inputs), rate, fold(key, 0))

  def transform(
    self,
    carry: Carry,
    metadata: attention.Metadata,
    loop: Array | int,
    kind: str,
    key: Array | None,
  ) -> Carry:
    """f_theta in a loop: the stack and, if "per_loop", the norm; [B, T, D].

    Rematerialisation is per layer: the inputs of all K L layers take less
    memory than everything that the L layers of one loop compute.
    """
    x, cache = stack.run_layers(
      self.layers,
      *carry,
      metadata,
      first_slot=loop * self.config.num_layers,
      key=key,
      unroll=kind == "unroll",
      remat=self.options.remat,
    )
    ends_in_norm = self.config.loop_norm == "per_loop"
    return self.final_norm(x) if ends_in_norm else x, cache

  def logits(self, hidden: Array) -> Array:
    """The read-out of a loop: H W^T, f32 [B, T, V]."""
    return linear.token_logits(
      self.normed(hidden), self.readout_table(), self.spec.num_padding_tokens
    )

  def normed(self, hidden: Array) -> Array:
    """What the read-out decodes: the normed state, f32 [B, T, D]."""
    last = self.config.loop_norm == "final_only"
    return self.final_norm(hidden) if last else hidden

  def readout_table(self) -> Array:
    """W, [V, D]."""
    if self.config.tied:
      return self.token_embedding.embedding[...]
    return self.head.kernel[...].T

  def exit_logits(self, hidden: Array) -> Array:
    """Log odds of the chance to exit after a loop, f32 [...], of H [..., D].

    In float32 whatever `precision` says: in bfloat16 their sigmoid is 1 from
    6.5 on (Ouro, section 3.2).
    """
    return self.exit_gate(self.normed(hidden))[..., 0]

  def _record(self, hidden: Array, names: tuple[str, ...]) -> dict[str, Array]:
    """Statistics of a loop, and its requested traces."""
    norms = jnp.linalg.norm(hidden, axis=-1)
    record = {"hidden_norm": jnp.mean(norms)}
    if "hidden" in names:
      record["hidden"] = hidden
    if "prediction" in names or "confidence" in names:
      record |= linear.prediction_and_confidence(self.logits(hidden))
    return record


def loss(
  model: Model, batch: Batch, key: Array, step: Array, frozen: Frozen
) -> tuple[Array, Metrics]:
  """Cross-entropy after the last loop or over all exits, weighted by token.

  Returns:
    (f32 scalar, metrics: scalars and per-loop vectors by name).
  """
  del step, frozen  # No schedule, no teacher.
  config, documents = model.config, batch.get("documents")
  reads: dict[str, Any] = {
    "num_padding_tokens": model.spec.num_padding_tokens,
    "precision": PRECISIONS[config.precision],
  }
  has_exits = config.exit_gate in ("joint", "alone")
  trace = ("hidden",) if has_exits else ()
  output = model(batch["inputs"], documents=documents, key=key, trace=trace)
  table = model.readout_table()
  if not has_exits:
    total, _ = token_losses.next_token(output.hidden, table, batch, **reads)
    return total, {"loss": total, **output.loops}
  hidden = output.trace["hidden"]
  if config.exit_gate == "alone":
    hidden = jax.lax.stop_gradient(hidden)
  losses = token_losses.of_loops(model.normed(hidden), table, batch, **reads)
  logits = model.exit_logits(hidden)
  total, metrics = exit_losses.expected(
    losses, exits.log_distribution(logits), batch, config.entropy_weight
  )
  if config.exit_gate == "alone":
    total = exit_losses.improvement(losses, logits, batch)
  return total, {"loss": total, **metrics, **output.loops}


def costs(config: Config, spec: TaskSpec, num_loops: int) -> dict[str, object]:
  """Forward FLOPs of one example by loop, and of training if it reads all out.

  A multiply-add counts as two; point-wise operations are left out.
  """
  shape = config.block_shape()
  per_loop = config.num_layers * block.flops(shape, spec.sequence_length)
  head = 2 * spec.sequence_length * config.width * spec.vocab_size
  # Every loop is read out in training; a gate alone needs no backward pass.
  forward = num_loops * (per_loop + head)
  passes = {"joint": 3, "alone": 1}.get(config.exit_gate)
  return {
    "flops_per_example": [
      head + per_loop * (loop + 1) for loop in range(num_loops)
    ],
    **({"training_flops_per_example": passes * forward} if passes else {}),
  }
