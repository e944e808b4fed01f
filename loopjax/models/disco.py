"""DiscoLoop: a looped transformer with a discrete and a continuous channel.

Source: arXiv 2607.00341, section 4. Between two loops of the vanilla looped
transformer (`loopjax.models.looped`), the hidden state is decoded to a
distribution over tokens, and the mean embedding under it is added to the state.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from flax import nnx

from loopjax import checks
from loopjax.loop import channel, driver
from loopjax.models import causal, every_loop, exiting, reading
from loopjax.nn import block, norm
from loopjax.nn.attention.cache import Cache
from loopjax.protocols import Exits, Family
from loopjax.types import (
  PRECISIONS,
  Array,
  LoopOptions,
  Output,
  Precision,
  TaskSpec,
)

TRACES = ("hidden", "mixed", "gate", "prediction", "confidence")


@dataclasses.dataclass(frozen=True)
class Config(causal.Config):
  """Hyper-parameters; K, alpha and tau are the paper's, the others GPT-2's.

  Those of `causal.Config`, and:

  Attributes:
    loop_norm: "per_loop": f_theta ends with an RMS norm, as in Ouro;
      "final_only": the norm is part of the read-out and of the input of Phi.
    gate: "fixed" alpha, or "learned" from Phi (equation 6).
    gate_value: alpha of a fixed gate; 0 is the vanilla loop, and the following
      settings of Phi then have no effect and must keep their defaults.
    temperature: tau of Phi; the logits are divided by it.
    top_k: Phi averages over the k most likely tokens, renormalised (appendix B:
      128); 0 for the whole vocabulary.
    decode_gradient: "full" (the paper); "stop": no gradient through Phi;
      "straight_through": the embedding of the most likely token with the
      gradient of Phi.
    epsilon: added to the mean square of Phi in its RMS norm. The paper states
      none; 1e-6 is the value of Ouro, its language model, and of the other
      norms here. At initialisation, Phi over V tokens has a mean square of
      about init_std^2 / V, so 1e-6 damps the channel: the RMS of its output is
      0.53 for V = 1,051 (the symbolic task) and would be 0.056 for V = 129,280,
      instead of 1. When Phi is close to the embedding of a single token, its
      mean square is about init_std^2 and the damping vanishes.
  """

  loop_norm: str = "per_loop"
  gate: str = checks.setting("fixed", own=True)
  gate_value: float = checks.setting(1.0, least=0)
  temperature: float = checks.setting(1.0, above=0)
  top_k: int = checks.setting(0, least=0)
  decode_gradient: str = "full"
  epsilon: float = checks.setting(1e-6, above=0, own=True)

  def __post_init__(self) -> None:
    super().__post_init__()
    checks.one_of(
      "model",
      self,
      loop_norm=causal.LOOP_NORMS,
      gate=GATES,
      decode_gradient=channel.GRADIENTS,
    )
    if self.gate == "learned":
      checks.without_effect("model", self, "gate", "gate_value")
    if not self.gate_value:
      decoding = ("temperature", "top_k", "decode_gradient", "epsilon")
      checks.without_effect("model", self, "gate_value", *decoding)


GATES: dict[str, Callable[[Config, Precision], Any]] = {
  "fixed": lambda config, _: channel.FixedGate(config.gate_value),
  "learned": lambda config, precision: channel.LearnedGate(
    config.width, precision=precision
  ),
}


class Model(nnx.Module):
  """The looped transformer with both channels between loops."""

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
    self.channel = self._make_channel()

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
    """Predicts every next token (equation 4).

    Args:
      inputs, num_loops, kind, documents, cache, valid, keys: see
        `causal.begin`.
      trace: names from TRACES: "hidden" H^1 .. H^K and "mixed" H~^1 .. H~^K
        f32 [K, B, T, D], where H~^K = H^K; "gate" alpha^0 .. alpha^{K-1} f32
        [K, B, T], where alpha^{K-1} = 0; "prediction", argmax of the read-out
        after every loop, i32 [K, B, T]; "confidence", its probability, f32
        [K, B, T].
      targets: int [B, T]; the trace then also has what `every_loop.measured`
        records after every loop, [K, B, ...].
    """
    call = causal.begin(
      self, inputs, num_loops, kind, documents, cache, valid, keys
    )
    table = self.readout_table()

    def record(
      before: Array, hidden: Array, mixed: Array, gate: Array
    ) -> every_loop.Record:
      stats = {
        "hidden_norm": norm.mean_norm(hidden),
        "gate_mean": jnp.mean(gate),
      }
      states: dict[str, Any] = {"hidden": hidden, "mixed": mixed, "gate": gate}
      return every_loop.record(
        self, trace, stats, before=before, targets=targets, **states
      )

    def step(
      carry: causal.Carry, k: Array
    ) -> tuple[causal.Carry, every_loop.Record]:
      hidden, cache = self.transform(call, carry, k)  # H^{k+1}
      decoded = self.readout_input(hidden)
      mixed, gate = self.channel(hidden, decoded, table)  # H~^{k+1}
      return (mixed, cache), record(carry[0], hidden, mixed, gate)

    # There is no channel after the last loop: alpha^{K-1} = 0.
    def last(
      carry: causal.Carry, k: Array | int
    ) -> tuple[causal.Carry, every_loop.Record]:
      hidden, cache = self.transform(call, carry, k)  # H^K
      none = jnp.zeros(inputs.shape)
      return (hidden, cache), record(carry[0], hidden, hidden, none)

    carry, records, steps_run = driver.run_loop(
      step,
      (self.embed(inputs, keys), cache),
      call.num_loops - 1,
      kind=call.kind,
      part=causal.STATE,
    )
    carry, of_last = driver.run_once(
      last, carry, call.num_loops - 1, kind=call.kind, part=causal.STATE
    )
    records = every_loop.joined(records, of_last)
    return causal.output(self, call, carry, records, steps_run + 1)

  def _make_channel(self) -> channel.MixedChannel:
    """The channel of equations 4 to 6, as configured."""
    config, precision = self.config, PRECISIONS[self.config.precision]
    channel.check_top_k(config.top_k, self.spec)
    decoder = channel.SoftDecoder(
      config.temperature,
      config.top_k,
      config.decode_gradient,
      self.spec.num_padding_tokens,
      precision,
    )
    gate = GATES[config.gate](config, precision)
    return channel.MixedChannel(decoder, gate, config.epsilon)


def read(
  model: Model, tokens: Array, cache: Cache, **options: Any
) -> tuple[Output, Cache]:
  """`Reading.read` with early exits: `exiting.read`, with both channels.

  The state of a token that exits is H^k, before the channels.
  """
  table = model.readout_table()

  def mixed(hidden: Array) -> Array:
    return model.channel(hidden, model.readout_input(hidden), table)[0]

  return exiting.read(model, tokens, cache, between=mixed, **options)


def costs(config: Config, spec: TaskSpec, num_loops: int) -> dict[str, object]:
  """FLOPs of a forward pass on one example, by number of loops.

  The selection of the k most likely tokens is not counted.
  """
  tokens, width = spec.sequence_length, config.width
  shape = config.block_shape()
  per_loop = config.num_layers * block.flops(shape, tokens)
  head = 2 * tokens * width * spec.vocab_size
  # Phi (logits and the mean of V or k embeddings), then the gate.
  averaged = config.top_k or spec.vocab_size
  gate = width if config.gate == "learned" else 0
  mixing = head + 2 * tokens * (averaged * width + gate)
  if config.decode_gradient == "straight_through":
    mixing += head + 2 * tokens * width
  by_loop = block.flops_by_loop(head, per_loop, num_loops, between=mixing)
  return {"flops_per_example": by_loop}


FAMILY = Family(
  Config=Config,
  Model=Model,
  loss=causal.loss,
  costs=costs,
  traces=TRACES,
  reads_out_every_loop=every_loop.reads_out_every_loop,
  reading=dataclasses.replace(
    reading.READING,
    read=read,
    exits=Exits(check=exiting.check_ungated),
  ),
)
