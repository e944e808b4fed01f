"""MELT: a looped transformer whose loops share keys and values.

Source: arXiv 2605.07721. The parameters are those of a `looped` model with
loop_norm="per_loop", and gates. Training starts from such a model
(`run.init_from`).
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
    config.check_kernels(options)
    self.config, self.spec, self.options = config, spec, options
    self.token_embedding = causal.token_embedding(config, spec, rngs)
    self.layers = causal.layers(config, config.num_layers, options, rngs)
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
    """Predicts every next token, in chunks of `Config.prefill_chunk` tokens.

    Args:
      inputs: token ids [B, T]; any T. Padding must be at the end.
      num_loops: K >= 1; may differ from the number in training.
      kind: how the loop is executed; as in the model's options if None.
      trace: names from TRACES: "hidden" f32 [K, B, T, D]; "prediction", argmax
        of the read-out after every loop, i32 [K, B, T]; "confidence", its
        probability, f32 [K, B, T].
      documents: i32 [B, T], a number for each document of a row; tokens attend
        within their document. None if a row is one document. Chunks do not
        depend on documents.
    """
    num_tokens = inputs.shape[1]
    size = min(self.config.read_chunk(self.spec), num_tokens)
    missing = ((0, 0), (0, -num_tokens % size))
    whole = jnp.pad(inputs, missing)
    if documents is not None:
      documents = jnp.pad(documents, missing)
    options = self.pass_options(
      num_loops, kind, keep=("hidden",) if trace else ()
    )
    hidden, records = passes.run(
      self.stack(),
      options._replace(chunk_size=size),
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
        lambda x: linear.prediction_and_confidence(self.logits(x)), by_loop
      )
    loops_run = jnp.full(len(inputs), options.num_loops, jnp.float32)
    return Output(
      logits=self.logits(hidden),
      losses={},
      stats={"loops_run": loops_run},
      loops={"hidden_norm": records["hidden_norm"]},
      trace={name: traced[name] for name in trace},
      hidden=hidden,
    )

  def stack(self) -> passes.Stack:
    """The parameters that every loop uses."""
    layers = layer_lib.Layer(self.layers, self.latent_gates)
    return passes.Stack(layers, self.final_norm)

  def pass_options(
    self,
    num_loops: int | None = None,
    kind: str | None = None,
    keep: tuple[str, ...] = (),
  ) -> passes.Options:
    """Options of `passes.run` with one chunk; defaults from the config."""
    config = self.config
    num_loops = config.num_loops if num_loops is None else num_loops
    if num_loops < 1:
      raise UserError(f"num_loops={num_loops} must be at least 1")
    return passes.Options(
      gate=config.gate,
      num_loops=num_loops,
      rope_base=config.rope_base,
      kind=kind or self.options.kind,
      remat=self.options.remat,
      keep=keep,
    )

  def readout_input(self, hidden: Array) -> Array:
    """The state after a loop [..., D], which ends with a norm."""
    return hidden

  @jax.named_scope("gate")
  def exit_logits(self, hidden: Array) -> Array:
    """Log-odds of the exit gate f32 [...], of the state after a loop [..., D].

    The gate was trained with the looped model that the parameters come from.
    """
    return self.exit_gate(hidden)[..., 0]
