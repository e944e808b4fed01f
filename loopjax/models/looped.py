"""Looped transformer: one stack of blocks, applied K times.

Source: the vanilla loop of DiscoLoop (arXiv 2607.00341, equation 2),
H^0 = W[x], H^{k+1} = f_theta(H^k), logits H^K W^T; and Ouro (arXiv 2510.25741),
which adds norms after attention and MLP, a separate output matrix, and an exit
gate after every loop.
"""

import dataclasses

import jax
from flax import nnx

from loopjax import checks
from loopjax.errors import Moot, UserError
from loopjax.loop import driver, exits
from loopjax.losses import exits as exit_losses
from loopjax.losses import tokens as token_losses
from loopjax.models import causal, every_loop, exiting, reading
from loopjax.nn import block, norm, rope
from loopjax.nn.attention.cache import Cache
from loopjax.nn.keys import by_example
from loopjax.protocols import AnyTeacher, Exits, Family
from loopjax.types import Array, Batch, LoopOptions, Metrics, Output, TaskSpec

TRACES = ("hidden", "prediction", "confidence", "relative_change")
EXIT_GATES = ("none", "joint", "alone", "unused")


@dataclasses.dataclass(frozen=True)
class Config(causal.Config):
  """Hyper-parameters; DiscoLoop states only K, the other defaults are GPT-2's.

  Those of `causal.Config`, and:

  Attributes:
    qk_norm: whether each head's queries and keys have an RMS norm, before the
      rotation.
    qk_bias: whether queries and keys have a bias, before the rotation.
    value_bias: whether values have one.
    rope_scaling: the four numbers of `rope.Scaling`; empty for none.
    loop_norm: "per_loop": f_theta ends with an RMS norm, as in Ouro;
      "final_only": the norm is part of the output layer.
    tied: whether the output layer uses the embedding table or a separate one.
    exit_gate: "none": no gate; "unused": a gate that is not trained; the loss
      of both is the cross-entropy after the last loop. "joint": the gate is
      trained with the model, on the expected loss over exits. "alone": only the
      gate is trained, on the improvement of the loss by each loop.
    entropy_weight: beta, weight of the entropy of the exit distribution in
      "joint"; Ouro uses 0.1, later 0.05.
  """

  qk_norm: bool = False
  qk_bias: bool = False
  value_bias: bool = False
  rope_scaling: tuple[float, ...] = ()
  loop_norm: str = "per_loop"
  tied: bool = True
  exit_gate: str = "none"
  entropy_weight: float = checks.setting(0.05, least=0)

  def __post_init__(self) -> None:
    super().__post_init__()
    checks.one_of(
      "model", self, loop_norm=causal.LOOP_NORMS, exit_gate=EXIT_GATES
    )
    rope.check_scaling(self.rope_scaling)
    if self.exit_gate != "joint":
      checks.without_effect("model", self, "exit_gate", "entropy_weight")
    if self.num_loops == 1 and self.exit_gate in ("joint", "alone"):
      raise UserError(
        f"model.exit_gate={self.exit_gate!r} needs model.num_loops of at least"
        " 2: with one loop there is only one exit",
        (Moot("model.exit_gate", "none", ("model.num_loops",)),),
      )


class Model(nnx.Module):
  """The vanilla looped transformer."""

  embed = causal.embed
  transform = causal.transform
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
    self.token_embedding = causal.token_embedding(config, spec, rngs)
    self.layers = causal.layers(config, config.num_layers, options, rngs)
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
    kind: driver.Kind | None = None,
    trace: tuple[str, ...] = (),
    documents: Array | None = None,
    cache: Cache | None = None,
    valid: Array | None = None,
    keys: Array | None = None,
    targets: Array | None = None,
  ) -> Output:
    """Predicts every next token (equation 2).

    Args:
      inputs, num_loops, kind, documents, cache, valid, keys: see
        `causal.begin`.
      trace: names from TRACES: "hidden" H^1 .. H^K f32 [K, B, T, D];
        "prediction", argmax of the read-out after every loop, i32 [K, B, T];
        "confidence", its probability, f32 [K, B, T]; "relative_change" of the
        state, f32 [K, B], see `every_loop.state`.
      targets: int [B, T]; the trace then also has what `every_loop.measured`
        records after every loop, [K, B, ...].
    """
    call = causal.begin(
      self, inputs, num_loops, kind, documents, cache, valid, keys
    )

    def step(
      carry: causal.Carry, k: Array
    ) -> tuple[causal.Carry, every_loop.Record]:
      hidden, cache = self.transform(call, carry, k)  # H^{k+1} = f(H^k)
      stats = {"hidden_norm": norm.mean_norm(hidden)}
      record = every_loop.record(
        self, trace, stats, before=carry[0], targets=targets, hidden=hidden
      )
      return (hidden, cache), record

    carry, records, steps_run = driver.run_loop(
      step,
      (self.embed(inputs, keys), cache),
      call.num_loops,
      kind=call.kind,
      part=causal.STATE,
    )
    return causal.output(self, call, carry, records, steps_run)

  @jax.named_scope("gate")
  def exit_logits(self, hidden: Array) -> Array:
    """Log-odds of the exit gate f32 [...], of the state after a loop [..., D].

    Always in float32: in bfloat16 the sigmoid of 6.5 is rounded to 1 (Ouro,
    section 3.2).
    """
    return self.exit_gate(self.readout_input(hidden))[..., 0]


def loss(
  model: Model, batch: Batch, key: Array, step: Array, teacher: AnyTeacher
) -> tuple[Array, Metrics]:
  """The loss of the config's `exit_gate`, weighted by token.

  Returns:
    (f32 scalar, metrics: scalars and per-loop vectors by name).
  """
  del step, teacher  # No schedule, no teacher.
  config, documents = model.config, batch.get("documents")
  has_exits = config.exit_gate in ("joint", "alone")
  trace = ("hidden",) if has_exits else ()
  keys = by_example(key, batch)
  output = model(batch["inputs"], documents=documents, keys=keys, trace=trace)
  if not has_exits:
    return token_losses.output_loss(model, output, batch)
  hidden = output.trace["hidden"]
  if config.exit_gate == "alone":
    hidden = jax.lax.stop_gradient(hidden)
  losses = token_losses.next_token_by_loop(
    model, model.readout_input(hidden), batch["targets"]
  )
  logits = model.exit_logits(hidden)
  total, metrics = exit_losses.expected(
    losses, exits.log_distribution(logits), batch, config.entropy_weight
  )
  if config.exit_gate == "alone":
    total = exit_losses.improvement(losses, logits, batch)
  return total, {**metrics, **output.loops}


def costs(config: Config, spec: TaskSpec, num_loops: int) -> dict[str, object]:
  """FLOPs of a forward pass on one example, by number of loops.

  Also FLOPs of a training step, if training computes a loss after every loop.
  """
  shape = config.block_shape()
  per_loop = config.num_layers * block.flops(shape, spec.sequence_length)
  head = 2 * spec.sequence_length * config.width * spec.vocab_size
  # With exits every loop is read out. "alone" needs no backward pass through
  # the model.
  forward = num_loops * (per_loop + head)
  passes = {"joint": 3, "alone": 1}.get(config.exit_gate)
  return {
    "flops_per_example": block.flops_by_loop(head, per_loop, num_loops),
    **({"training_flops_per_example": passes * forward} if passes else {}),
  }


FAMILY = Family(
  Config=Config,
  Model=Model,
  loss=loss,
  costs=costs,
  traces=TRACES,
  untrained=exiting.untrained,
  reads_out_every_loop=every_loop.reads_out_every_loop,
  reading=dataclasses.replace(
    reading.READING,
    read=exiting.read,
    exits=Exits(
      rule=exiting.exit_rule,
      check=exiting.check_exits,
    ),
  ),
)
