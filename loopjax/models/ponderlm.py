"""PonderLM: a looped transformer with only the discrete channel.

Source: arXiv 2505.20674; K loops are its K - 1 pondering steps and the last
pass. e^0 = E[x], e^{s+1} = e^0 + Phi(LM(e^s)) with Phi(h) = sum_v p_v E[v] and
p = softmax(U h / tau), logits U LM(e^{K-1}). A baseline of DiscoLoop (arXiv
2607.00341, section 5.3).
"""

import dataclasses
from typing import Any

from flax import nnx

from loopjax import checks
from loopjax.loop import channel, driver
from loopjax.models import causal, every_loop, exiting, reading
from loopjax.nn import block, norm
from loopjax.nn.attention.cache import Cache
from loopjax.protocols import Exits, Family
from loopjax.types import PRECISIONS, Array, LoopOptions, Output, TaskSpec

TRACES = ("hidden", "mixed", "prediction", "confidence")


@dataclasses.dataclass(frozen=True)
class Config(causal.Config):
  """Hyper-parameters; defaults as in `loopjax.models.disco`, for comparison.

  Those of `causal.Config`, and:

  Attributes:
    num_loops: K, number of loops in training; the authors use 3 pondering
      steps, that is, K = 4.
    tied: whether U is the embedding table; else it is a separate matrix
      (Pythia).
    temperature: tau; the logits are divided by it.
    top_k: Phi averages over the k most likely tokens, renormalised; 0 for the
      whole vocabulary.
  """

  num_loops: int = 4
  tied: bool = True
  temperature: float = checks.setting(1.0, above=0)
  top_k: int = checks.setting(0, least=0)

  def __post_init__(self) -> None:
    super().__post_init__()


class Model(nnx.Module):
  """The looped transformer with only the discrete channel between loops."""

  embed = causal.embed
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
    channel.check_top_k(config.top_k, spec)
    self.decode = channel.SoftDecoder(
      config.temperature,
      config.top_k,
      num_padding_tokens=spec.num_padding_tokens,
      precision=PRECISIONS[config.precision],
    )

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
      inputs, num_loops, kind, documents, cache, valid, keys: see
        `causal.begin`.
      trace: names from TRACES: "hidden" LM(e^0) .. LM(e^{K-1}) f32
        [K, B, T, D]; "mixed" e^1 .. e^{K-1}, e^{K-1} f32 [K, B, T, D];
        "prediction", argmax of the read-out after every loop, i32 [K, B, T];
        "confidence", its probability, f32 [K, B, T].
      targets: int [B, T]; the trace then also has what `every_loop.measured`
        records after every loop, [K, B, ...].
    """
    call = causal.begin(
      self, inputs, num_loops, kind, documents, cache, valid, keys
    )
    initial = self.embed(inputs, keys)  # e^0
    ponder = self.pondering(initial)

    def record(
      before: Array, hidden: Array, embedding: Array
    ) -> every_loop.Record:
      stats = {"embedding_norm": norm.mean_norm(embedding)}
      states: dict[str, Any] = {"hidden": hidden, "mixed": embedding}
      return every_loop.record(
        self, trace, stats, before=before, targets=targets, **states
      )

    def step(
      carry: causal.Carry, s: Array
    ) -> tuple[causal.Carry, every_loop.Record]:
      hidden, cache = self.transform(call, carry, s)  # LM(e^s)
      embedding = ponder(hidden)  # e^{s+1}
      return (embedding, cache), record(carry[0], hidden, embedding)

    # The last pass is read out; its state is not decoded to an embedding.
    def last(
      carry: causal.Carry, s: Array | int
    ) -> tuple[causal.Carry, every_loop.Record]:
      hidden, cache = self.transform(call, carry, s)
      return (hidden, cache), record(carry[0], hidden, carry[0])

    carry, records, steps_run = driver.run_loop(
      step,
      (initial, cache),
      call.num_loops - 1,
      kind=call.kind,
      part=causal.STATE,
    )
    carry, of_last = driver.run_once(
      last, carry, call.num_loops - 1, kind=call.kind, part=causal.STATE
    )
    records = every_loop.joined(records, of_last)
    return causal.output(self, call, carry, records, steps_run + 1)

  def pondering(self, initial: Array) -> exiting.Between:
    """The function LM(e^s) -> e^{s+1}, given e^0; [B, T, D] each."""
    table = self.token_embedding.embedding[...]
    head = None if self.config.tied else self.readout_table()
    return lambda hidden: initial + self.decode(hidden, table, head)

  def transform(
    self, call: causal.Call, carry: causal.Carry, loop: Array | int
  ) -> causal.Carry:
    """LM: the stack and the final norm."""
    hidden, cache = causal.run_stack(self, self.layers, call, carry, loop)
    return self.final_norm(hidden), cache

  def readout_input(self, hidden: Array) -> Array:
    """The output of LM, [B, T, D], which ends with a norm."""
    return hidden


def read(
  model: Model, tokens: Array, cache: Cache, **options: Any
) -> tuple[Output, Cache]:
  """`Reading.read` with early exits: `exiting.read`, with pondering.

  A token that exits, or whose loops continue later, has the state
  LM(e^s).
  """
  ponder = model.pondering(model.embed(tokens, None))
  return exiting.read(model, tokens, cache, between=ponder, **options)


def costs(config: Config, spec: TaskSpec, num_loops: int) -> dict[str, object]:
  """FLOPs of a forward pass on one example, by number of loops.

  The selection of the k most likely tokens is not counted.
  """
  tokens, width = spec.sequence_length, config.width
  shape = config.block_shape()
  per_loop = config.num_layers * block.flops(shape, tokens)
  head = 2 * tokens * width * spec.vocab_size
  # Phi: logits, and the mean of V or k embeddings.
  mixing = head + 2 * tokens * width * (config.top_k or spec.vocab_size)
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
