"""PonderLM: a looped transformer with only the discrete channel.

Source: arXiv 2505.20674; K loops are its K - 1 pondering steps and the last
pass. e^0 = E[x], e^{s+1} = e^0 + Phi(LM(e^s)) with Phi(h) = sum_v p_v E[v] and
p = softmax(U h / tau), logits U LM(e^{K-1}). A baseline of DiscoLoop (arXiv
2607.00341, section 5.3).
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from loopjax import checks
from loopjax.errors import UserError
from loopjax.loop import channel, driver
from loopjax.losses import tokens as token_losses
from loopjax.models.reading import empty_cache as empty_cache
from loopjax.models.reading import read as read
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

TRACES = ("hidden", "mixed", "prediction", "confidence")
CACHES = cache_lib.KINDS
HEADLINE: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Config:
  """Hyper-parameters; defaults as in `loopjax.models.disco`, for comparison.

  Attributes:
    width: D. num_layers: L. num_heads: H.
    mlp: "gelu" (GPT-2), "swiglu" or "geglu". mlp_ratio: F = floor(mlp_ratio D).
    post_norm: whether attention and MLP also have an RMS norm after them (Ouro,
      arXiv 2510.25741).
    num_loops: K, number of loops in training; the authors use 3 pondering
      steps, that is, K = 4.
    residual: what Phi is added to: "initial": the embedding e^0; "running":
      e^s, which accumulates all of them (the authors' first code).
    tied: whether U is the embedding table; else it is a separate matrix
      (Pythia).
    embedding_scale: E is the embedding table ("none"), or the table times
      sqrt(D) ("sqrt_width"), in e^0 and in Phi.
    input_scale: factor of e^0; the authors' larger models use K - 1.
    temperature: tau; the logits are divided by it.
    top_k: Phi averages over the k most likely tokens, renormalised; 0 for the
      whole vocabulary.
    dropout: dropout rate on embeddings and on the outputs of attention and MLP,
      in training.
    rope_base: longest wavelength over 2 pi, in tokens.
    init_std: standard deviation of the initial values of every matrix,
      including the embedding table.
    precision: "float32" or "bfloat16", the dtype of matrix products.
  """

  width: int = 768
  num_layers: int = 4
  num_heads: int = 12
  mlp: str = "gelu"
  mlp_ratio: float = 4.0
  post_norm: bool = False
  num_loops: int = 4
  residual: str = "initial"
  tied: bool = True
  embedding_scale: str = "none"
  input_scale: float = 1.0
  temperature: float = 1.0
  top_k: int = 0
  dropout: float = 0.0
  rope_base: float = 10_000.0
  init_std: float = 0.02
  precision: str = "float32"

  def __post_init__(self) -> None:
    checks.plain_values("model", self)
    checks.one_of(
      "model",
      self,
      residual=("initial", "running"),
      embedding_scale=("none", "sqrt_width"),
      precision=PRECISIONS,
    )
    checks.at_least("model", self, num_loops=1, top_k=0)
    checks.at_least("model", self, num_layers=1, rope_base=1, init_std=0)
    for field in ("temperature", "input_scale"):
      if not getattr(self, field) > 0:
        raise UserError(f"model.{field}={getattr(self, field)} must be > 0")
    self.block_shape()

  def block_shape(self) -> Shape:
    """Structure of the stack's blocks; raises UserError if it is invalid."""
    return stack.block_shape(
      width=self.width,
      num_heads=self.num_heads,
      mlp=self.mlp,
      mlp_ratio=self.mlp_ratio,
      post_norm=self.post_norm,
      dropout=self.dropout,
      init_std=self.init_std,
    )


# The residual stream, and the cache, if any.
Carry = tuple[Array, Cache | None]


class Model(nnx.Module):
  """The looped transformer with only the discrete channel between loops."""

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
    num_tokens = spec.vocab_size - spec.num_padding_tokens
    if config.top_k > num_tokens:
      raise UserError(
        f"model.top_k={config.top_k} is more than the {num_tokens} tokens of"
        " the task"
      )
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
    kind: str | None = None,
    trace: tuple[str, ...] = (),
    documents: Array | None = None,
    cache: Cache | None = None,
    valid: Array | None = None,
    key: Array | None = None,
  ) -> Output:
    """Predicts every next token.

    Args:
      inputs: token ids [B, T]; any T. Padding must be at the end.
      num_loops: K >= 1; may differ from the number in training.
      kind: how the loop is executed; as in the model's options if None.
      trace: names from TRACES: "hidden" LM(e^0) .. LM(e^{K-1}) f32
        [K, B, T, D]; "mixed" e^1 .. e^{K-1}, e^{K-1} f32 [K, B, T, D];
        "prediction", argmax of the read-out after every loop, i32 [K, B, T];
        "confidence", its probability, f32 [K, B, T].
      documents: i32 [B, T], a number for each document of a row; tokens attend
        within their document. None if a row is one document.
      cache: cache of the tokens that precede these, or None.
      valid: bool [B, T], False for padding; only with a cache. None without
        padding.
      key: random key of dropout; None for no dropout, as in evaluation.
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
    table, head = self.token_embedding.embedding[...], self._head()
    scaled = config.embedding_scale == "sqrt_width"
    scale = config.width**0.5 if scaled else 1.0
    initial = config.input_scale * scale * self.token_embedding(inputs)  # e^0
    initial = dropout(initial, config.dropout, fold(key, 0))

    def step(carry: Carry, s: Array) -> tuple[Carry, dict[str, Array]]:
      pass_key = fold(key, s + 1)
      hidden, cache = self._transform(
        carry, metadata, s, kind, pass_key
      )  # LM(e^s)
      base = initial if config.residual == "initial" else carry[0]
      embedding = base + scale * self.decode(hidden, table, head)  # e^{s+1}
      return (embedding, cache), self._record(hidden, embedding, trace)

    # The last pass is read out; its state is not decoded to an embedding.
    carry, records, steps_run = driver.run_loop(
      step,
      (initial, cache),
      num_loops - 1,
      kind=kind if num_loops > 1 else "scan",  # Nothing to unroll.
    )
    last_key = fold(key, num_loops)
    hidden, cache = self._transform(
      carry, metadata, num_loops - 1, kind, last_key
    )  # LM(e^{K-1})
    last = self._record(hidden, carry[0], trace)
    records = jax.tree.map(
      lambda rows, row: jnp.concatenate([rows, row[None]]), records, last
    )
    return Output(
      logits=self._logits(hidden),
      losses={},
      stats={"loops_run": jnp.full(len(inputs), steps_run + 1, jnp.float32)},
      loops={"embedding_norm": records["embedding_norm"]},
      trace={name: records[name] for name in trace},
      hidden=hidden,
      cache=cache and cache.extended(metadata.places),
    )

  def _transform(
    self,
    carry: Carry,
    metadata: attention.Metadata,
    loop: Array | int,
    kind: str,
    key: Array | None,
  ) -> Carry:
    """LM: the stack and the final norm."""
    x, cache = stack.run_layers(
      self.layers,
      *carry,
      metadata,
      first_slot=loop * self.config.num_layers,
      key=key,
      unroll=kind == "unroll",
      remat=self.options.remat,
    )
    return self.final_norm(x), cache

  def _head(self) -> Array | None:
    """U [V, D] if it is a separate matrix; None if it is E."""
    return None if self.config.tied else self.head.kernel[...].T

  def _logits(self, hidden: Array) -> Array:
    """Logits U h, f32 [B, T, V]."""
    return linear.token_logits(
      hidden, self.readout_table(), self.spec.num_padding_tokens
    )

  def readout_table(self) -> Array:
    """U [V, D], one row per token; logits are U h."""
    head = self._head()
    return self.token_embedding.embedding[...] if head is None else head

  def _record(
    self, hidden: Array, embedding: Array, names: tuple[str, ...]
  ) -> dict[str, Array]:
    """Statistics of a pass, and the requested traces."""
    norms = jnp.linalg.norm(embedding, axis=-1)
    record = {"embedding_norm": jnp.mean(norms)}
    traces = {"hidden": hidden, "mixed": embedding}
    record |= {name: traces[name] for name in names if name in traces}
    if "prediction" in names or "confidence" in names:
      record |= linear.prediction_and_confidence(self._logits(hidden))
    return record


def loss(
  model: Model, batch: Batch, key: Array, step: Array, frozen: Frozen
) -> tuple[Array, Metrics]:
  """Cross-entropy after the last loop, weighted by token.

  Returns:
    (f32 scalar, metrics: scalars and per-loop vectors by name).
  """
  del step, frozen  # No schedule, no teacher.
  documents = batch.get("documents")
  output = model(batch["inputs"], documents=documents, key=key)
  cross_entropy, _ = token_losses.next_token(
    output.hidden,
    model.readout_table(),
    batch,
    num_padding_tokens=model.spec.num_padding_tokens,
    precision=PRECISIONS[model.config.precision],
  )
  return cross_entropy, {"loss": cross_entropy, **output.loops}


def costs(config: Config, spec: TaskSpec, num_loops: int) -> dict[str, object]:
  """FLOPs of a forward pass on one example, by number of loops.

  A multiply-add counts as two; point-wise operations and the selection of the
  k most likely tokens are not counted.
  """
  tokens, width = spec.sequence_length, config.width
  shape = config.block_shape()
  per_loop = config.num_layers * block.flops(shape, tokens)
  head = 2 * tokens * width * spec.vocab_size
  # Phi: logits, and the mean of V or k embeddings.
  mixing = head + 2 * tokens * width * (config.top_k or spec.vocab_size)
  return {
    "flops_per_example": [
      head + per_loop * (loop + 1) + mixing * loop for loop in range(num_loops)
    ],
  }
