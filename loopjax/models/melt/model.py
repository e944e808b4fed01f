"""MELT: a looped transformer with one row of keys and values for all loops.

Source: arXiv 2605.07721. Its parameters are those of a `looped` model with a
norm in every loop, and gates; `run.init_from` begins with such a model.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from loopjax.errors import UserError
from loopjax.models import causal
from loopjax.models.melt import layer as layer_lib
from loopjax.models.melt import passes
from loopjax.models.melt.config import Config
from loopjax.nn import linear
from loopjax.types import Array, LoopOptions, Output, TaskSpec

TRACES = ("hidden", "prediction", "confidence")
CACHES = ("latent",)
HEADLINE: tuple[str, ...] = ()


class Model(nnx.Module):
  """The memory-efficient looped transformer."""

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
    config.check_length(spec)
    self.config, self.spec, self.options = config, spec, options
    self.token_embedding = causal.token_embedding(config, spec, rngs)
    self.layers = causal.layers(config, config.num_layers, rngs)
    self.latent_gates = layer_lib.make_gates(config, rngs)
    self.final_norm = causal.final_norm(config, rngs)
    if not config.tied:
      self.head = causal.head(config, spec, rngs)
    if config.exit_gate != "none":
      self.exit_gate = causal.exit_gate(config, rngs)

  def __call__(
    self,
    inputs: Array,
    *,
    num_loops: int | None = None,
    kind: str | None = None,
    trace: tuple[str, ...] = (),
    documents: Array | None = None,
  ) -> Output:
    """Predicts every next token, reading `Config.prefill_chunk` at a time.

    Args:
      inputs: token ids [B, T]; any T. Padding must be at the end.
      num_loops: K >= 1; it may differ from the trained number.
      kind: how the loop runs; the model's own options if None.
      trace: names from TRACES: "hidden" f32 [K, B, T, D], "prediction" of every
        loop, argmax of its read-out, i32 [K, B, T], and "confidence", its
        probability, f32 [K, B, T].
      documents: i32 [B, T], a number for each document of a row, which sees no
        other; None if a row is one document. Chunks are those of the row.
    """
    num_tokens = inputs.shape[1]
    size = min(self.config.read_chunk(self.spec), num_tokens)
    missing = ((0, 0), (0, -num_tokens % size))
    whole = jnp.pad(inputs, missing)
    if documents is not None:
      documents = jnp.pad(documents, missing)
    plan = self.plan(num_loops, kind, keep=("hidden",) if trace else ())
    hidden, records = passes.run(
      self.stack(),
      plan._replace(chunk_size=size),
      self.token_embedding(whole),
      documents=documents,
    )
    hidden = hidden[:, :num_tokens]
    traced = {}
    if trace:
      by_loop = records["hidden"][:, :, :num_tokens]
      traced["hidden"] = by_loop
    if "prediction" in trace or "confidence" in trace:
      traced |= jax.lax.map(
        lambda x: linear.most_likely(self.logits(x)), by_loop
      )
    loops_run = jnp.full(len(inputs), plan.num_loops, jnp.float32)
    return Output(
      logits=self.logits(hidden),
      losses={},
      stats={"loops_run": loops_run},
      loops={"hidden_norm": records["hidden_norm"]},
      trace={name: traced[name] for name in trace},
      hidden=hidden,
    )

  def stack(self) -> passes.Stack:
    """What every loop runs."""
    layers = layer_lib.Layer(self.layers, self.latent_gates)
    return passes.Stack(layers, self.final_norm)

  def plan(
    self,
    num_loops: int | None = None,
    kind: str | None = None,
    keep: tuple[str, ...] = (),
  ) -> passes.Plan:
    """How it runs them, over whole rows."""
    config = self.config
    num_loops = config.num_loops if num_loops is None else num_loops
    if num_loops < 1:
      raise UserError(f"num_loops={num_loops} must be at least 1")
    return passes.Plan(
      gate=config.gate,
      num_loops=num_loops,
      rope_base=config.rope_base,
      kind=kind or self.options.kind,
      remat=self.options.remat,
      keep=keep,
    )

  def normed(self, hidden: Array) -> Array:
    """What the read-out decodes: `hidden`, which a loop has normed."""
    return hidden

  def exit_logits(self, hidden: Array) -> Array:
    """Log odds of the chance to exit after a loop, f32 [...], of H [..., D].

    The gate is that of the looped model whose parameters these were.
    """
    return self.exit_gate(hidden)[..., 0]
