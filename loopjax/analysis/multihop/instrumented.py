"""The only module of the analysis that runs the model, and edits its states."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from loopjax.analysis import evaluated as evaluated_lib
from loopjax.analysis.multihop.questions import Questions
from loopjax.loop import driver
from loopjax.nn import norm
from loopjax.saved import trained
from loopjax.types import Array

# Norms of equation 3, which the paper does not specify; "rms" gives unit scale,
# like the states of a loop that ends in a norm.
NORMS = ("rms", "match_hidden", "final_norm")
_EPSILON = 1e-6


def at_scale(
  vectors: Array, states: Array, kind: str, final_norm: Callable[[Array], Array]
) -> Array:
  """Norm(W[b]) of DiscoLoop's equation 3, f32 [..., D].

  Args:
    vectors: W[b], f32 [..., D].
    states: H, the states to replace, f32 [..., D].
    kind: one of NORMS: the RMS norm without a gain, W[b] scaled to the length
      of H, or the model's trained norm with its gain.
    final_norm: the model's trained norm.
  """
  if kind == "rms":
    return norm.rms_normalise(vectors, _EPSILON)
  if kind == "final_norm":
    return final_norm(vectors)
  assert kind == "match_hidden", kind
  norms = jnp.linalg.norm(states, axis=-1, keepdims=True)
  length = jnp.linalg.norm(vectors, axis=-1, keepdims=True)
  return vectors * (norms / jnp.maximum(length, _EPSILON))


def blend(
  state: dict[str, Array],
  k: Array,
  *,
  loop: Array,
  here: Array,
  alpha: Array,
  vectors: Array,
) -> dict[str, Array]:
  """(1 - alpha) H + alpha v at some positions after one loop (equation 3).

  Args:
    state: "hidden", H, the state after loop k, f32 [B, T, D].
    k: index of the loop from 0, i32 scalar.
    loop: the loop after which to replace, from 1, i32 scalar.
    here: positions to replace, bool [B, T].
    alpha: f32 scalar. 0 keeps H, 1 replaces it entirely.
    vectors: v of every example, f32 [B, D], finite.
  """
  hidden = state["hidden"]
  blended = (1 - alpha) * hidden + alpha * vectors[:, None, :]
  changes = here[:, :, None] & (k + 1 == loop)
  return {"hidden": jnp.where(changes, blended, hidden)}


def read_out(logits: Array, tokens: Array) -> dict[str, Array]:
  """The logit lens, P(e | H): the model's read-out of a state, for some tokens.

  Args:
    logits: f32 [..., V]; the logits of padding ids are negligibly low.
    tokens: ids of interest, int [..., n].

  Returns:
    f32 [..., n]: "probability" P(e | H); "rank" from 1, ties broken by the
    lower id (rank 1 is the argmax); "reciprocal_rank"; "margin", logit minus
    the best other token's logit; and "entropy" of the whole distribution in
    nats, the same for all n.
  """
  log_chances = jax.nn.log_softmax(logits, axis=-1)
  entropy = -jnp.sum(jnp.exp(log_chances) * log_chances, axis=-1)
  ours = jnp.take_along_axis(logits, tokens, axis=-1)[..., None]
  theirs = logits[..., None, :]  # [..., 1, V]
  ids = jax.lax.broadcasted_iota(jnp.int32, theirs.shape, theirs.ndim - 1)
  lower = ids < tokens[..., None]
  rank = 1 + jnp.sum((theirs > ours) | ((theirs == ours) & lower), axis=-1)
  others = jnp.where(ids == tokens[..., None], -jnp.inf, theirs)
  return {
    "probability": jnp.exp(jnp.take_along_axis(log_chances, tokens, axis=-1)),
    "rank": rank.astype(jnp.float32),
    "reciprocal_rank": 1 / rank.astype(jnp.float32),
    "margin": ours[..., 0] - jnp.max(others, axis=-1),
    "entropy": jnp.broadcast_to(entropy[..., None], tokens.shape),
  }


def mean_embedding(table: Array, num_padding_tokens: int) -> Array:
  """Mean row of W over all real tokens, not only entities, [D]."""
  return jnp.mean(table[: len(table) - num_padding_tokens], axis=0)


def cosines_of(
  states: Array, vectors: Array, centre: Array
) -> dict[str, Array]:
  """Cosines between states and embeddings (DiscoLoop, table 1b).

  Args:
    states: H, f32 [..., D].
    vectors: W[e] of n tokens, f32 [..., n, D].
    centre: from `mean_embedding`, [D].

  Returns:
    f32 [..., n]: "cosine", cos(H, W[e]), and "centred_cosine", cos(H - m,
    W[e] - m) with the mean embedding m subtracted from both.
  """
  middle = jnp.expand_dims(centre, range(states.ndim - 1))
  return {
    "cosine": _cosine(states, vectors),
    "centred_cosine": _cosine(
      states - middle, vectors - jnp.expand_dims(middle, -2)
    ),
  }


def _cosine(states: Array, vectors: Array) -> Array:
  """Cosine; zero where either vector is zero."""
  products = jnp.einsum(
    "...d,...nd->...n", states, vectors, precision="highest"
  )
  lengths = jnp.linalg.norm(states, axis=-1)[..., None]
  lengths = lengths * jnp.linalg.norm(vectors, axis=-1)
  return products / jnp.maximum(lengths, jnp.finfo(jnp.float32).tiny)


class Observed(NamedTuple):
  """A model's predictions and states on N questions, numpy arrays.

  Attributes:
    prediction: argmax of the read-out after every loop, int [N, K, T].
    lens: by name of `read_out`, f32 [N, K, T, H]; entry j - 1 is for the
      entity after hop j; arbitrary past the answer.
    cosines: "cosine" and "centred_cosine" of H^1, ..., H^K, before any norm of
      the read-out, and, for a family with a channel between loops,
      "mixed_cosine" and "mixed_centred_cosine" of its output; f32 [N, K, T, n],
      in the order of `tokens_compared`.
  """

  prediction: Any
  lens: dict[str, Any]
  cosines: dict[str, Any]


class InstrumentedModel(NamedTuple):
  """A trained model whose internals can be observed and edited.

  Attributes:
    num_loops: K.
    observe: (questions) -> Observed.
    passed_on: (inputs [n, T], loop, position int [n]) -> the input of the next
      loop at this position, f32 [n, D].
    embed: (token ids int [n], states f32 [n, D], kind) -> Norm(W[token]) of
      equation 3, f32 [n, D]; see `at_scale`.
    answer: (inputs [n, T], last int [n], loop, position int [n], alpha, vectors
      f32 [n, D]) -> the argmax at `last`, int [n], if the state after this loop
      at `position` becomes (1 - alpha) H + alpha v. One program serves all
      loops, positions, alphas and vectors.
  """

  num_loops: int
  observe: Callable[[Questions], Observed]
  passed_on: Callable[..., np.ndarray]
  embed: Callable[..., np.ndarray]
  answer: Callable[..., np.ndarray]


def tokens_compared(questions: Questions) -> dict[str, np.ndarray]:
  """The tokens that hidden states are compared with: ids by name, int [N].

  "hop1", ... are the entities after each hop; -1 past the answer. The controls
  are "start" (a), "relation1", ... and "random_entity", see `Questions`.
  """
  hops = range(1, questions.num_hops + 1)
  return {
    **{f"hop{hop}": questions.entities[:, hop] for hop in hops},
    "start": questions.entities[:, 0],
    **{f"relation{hop}": questions.relations[:, hop - 1] for hop in hops},
    "random_entity": questions.random_entity,
  }


def from_run(run: trained.TrainedModel) -> InstrumentedModel:
  """The model of a run, with the number of loops of its evaluation."""
  settings = run.settings
  return instrument(
    functools.partial(nnx.merge, run.graphdef),
    run.params,
    num_padding_tokens=settings.spec.num_padding_tokens,
    num_loops=settings.eval_loops,
    batch_size=settings.eval.batch_size,
    traces=settings.family.traces,
  )


def instrument(
  build: Callable[[Any], Any],
  params: Any,
  *,
  num_padding_tokens: int,
  num_loops: int,
  batch_size: int,
  traces: Sequence[str],
) -> InstrumentedModel:
  """Compiles the functions of an instrumented model.

  Args:
    build: function from parameters to a model that has the call, the
      `token_embedding` and the `final_norm` of `models.looped.Model`.
    num_padding_tokens: ids at the end that are not real tokens.
    num_loops: K.
    batch_size: examples per device call.
    traces: traces of the model. The state between loops is "mixed" if present,
      else "hidden".
  """
  states = tuple(name for name in ("hidden", "mixed") if name in traces)

  def compiled(function, **static):
    run = jax.jit(
      lambda params, *args: function(build(params), *args, **static)
    )
    return lambda columns, *shared: evaluated_lib.in_batches(
      lambda parts: run(params, *parts, *shared), columns, batch_size
    )

  observe = compiled(
    _observe,
    num_loops=num_loops,
    states=states,
    num_padding_tokens=num_padding_tokens,
  )
  passed_on = compiled(_passed_on, num_loops=num_loops, state=states[-1])
  embed = {kind: compiled(_embed, kind=kind) for kind in NORMS}
  answer = compiled(_answer, num_loops=num_loops)

  def observe_questions(questions: Questions) -> Observed:
    compared = np.stack(list(tokens_compared(questions).values()), axis=1)
    tokens = (questions.entities[:, 1:], compared)
    # Missing entities are looked up as token 0 and never reported.
    return observe((questions.inputs, *(np.maximum(ids, 0) for ids in tokens)))

  return InstrumentedModel(
    num_loops=num_loops,
    observe=observe_questions,
    passed_on=lambda inputs, loop, position: passed_on(
      (inputs, position), loop
    ),
    embed=lambda tokens, states, kind: embed[kind]((tokens, states)),
    answer=lambda inputs, last, loop, position, alpha, vectors: answer(
      (inputs, last, position, vectors), loop, alpha
    ),
  )


def _observe(
  model: Any,
  inputs: Array,
  entities: Array,
  compared: Array,
  *,
  num_loops: int,
  states: Sequence[str],
  num_padding_tokens: int,
) -> Observed:
  """One batch of `observe`: inputs [b, T], tokens [b, H] and [b, n]."""
  # Stage k is the answer of a run of k loops (section 3.2).
  outputs = [
    model(inputs, num_loops=loop, trace=states if loop == num_loops else ())
    for loop in range(1, num_loops + 1)
  ]
  logits = jnp.stack([output.logits for output in outputs], axis=1)
  shape = (*logits.shape[:3], entities.shape[-1])  # [b, K, T, H]
  seen = read_out(logits, jnp.broadcast_to(entities[:, None, None, :], shape))
  table = model.token_embedding.embedding[...]
  centre = mean_embedding(table, num_padding_tokens)
  vectors = table[compared][:, None, None]  # [b, 1, 1, n, D]
  cosines = {}
  for state in states:
    # Drops tokens that the model prepends to the question: [b, K, T, D].
    hidden = outputs[-1].trace[state][:, :, -inputs.shape[1] :]
    hidden = jnp.swapaxes(hidden, 0, 1)
    prefix = "" if state == "hidden" else f"{state}_"
    for name, value in cosines_of(hidden, vectors, centre).items():
      cosines[prefix + name] = value
  return Observed(jnp.argmax(logits, axis=-1), seen, cosines)


def _passed_on(
  model: Any,
  inputs: Array,
  position: Array,
  loop: Array,
  *,
  num_loops: int,
  state: str,
) -> Array:
  """One batch of `passed_on`."""
  output = model(inputs, num_loops=num_loops, trace=(state,))
  return output.trace[state][loop - 1, jnp.arange(len(inputs)), position]


def _embed(model: Any, tokens: Array, states: Array, *, kind: str) -> Array:
  """One batch of `embed`."""
  vectors = model.token_embedding.embedding[...][tokens]
  return at_scale(vectors, states, kind, model.final_norm)


def _answer(
  model: Any,
  inputs: Array,
  last: Array,
  position: Array,
  vectors: Array,
  loop: Array,
  alpha: Array,
  *,
  num_loops: int,
) -> Array:
  """One batch of `answer`."""
  edit = functools.partial(
    blend,
    loop=loop,
    here=jnp.arange(inputs.shape[1])[None] == position[:, None],
    alpha=alpha,
    vectors=vectors,
  )
  output = model(inputs, num_loops=num_loops, kind=driver.Watched(edit))
  return jnp.argmax(output.logits[jnp.arange(len(inputs)), last], axis=-1)
