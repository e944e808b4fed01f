"""Predictions of a trained language model for a text that it continues.

All slider positions of the page are computed at once: every number of loops
with every exit threshold. Readings are several sets of logits for the text and,
for each slider position, which of them applies to a token. Earlier tokens run
all loops, as in the published code of Ouro (arXiv 2510.25741).
"""

import functools
import itertools
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from loopjax import config as config_lib
from loopjax.errors import UserError
from loopjax.generate import source as source_lib
from loopjax.generate.requests import GenerationRequest
from loopjax.generate.sampling import Sampling
from loopjax.loop import exits
from loopjax.losses import tokens as token_losses
from loopjax.play.page import Inspection, Inspector, Source, facts
from loopjax.saved import language_model as language_model_lib
from loopjax.types import Array

THRESHOLDS = (1.0, 0.9, 0.7, 0.5, 0.3, 0.2, 0.1)
NUM_CANDIDATES = 5
_SMALLEST = 64  # Places of a text; twice as many if it is longer, and so on.
_RANDOM_TOKENS = 120
_WRITTEN = 64  # Tokens that follow a prompt, at most.
# Python refuses to read numbers of thousands of digits.
_SUM = re.compile(r"\d{1,99}(?:\+\d{1,99})+=")


class Readings(NamedTuple):
  """C sets of logits for a text, for K numbers of loops and Q thresholds.

  Attributes:
    logits: f32 [C, T, V].
    depth: loops that are run for a token, f32 [K, Q, T].
    readout: index of the set that applies to a token, i32 [K, Q, T].
    lens: index of the set after this number of loops, without exits, i32 [K,
      Q].
  """

  logits: Array
  depth: Array
  readout: Array
  lens: Array


Read = Callable[[Any, Array, int], Readings]


def load(source: Source) -> Inspector:
  """The inspector of a language model.

  Raises:
    UserError: its model does not predict next tokens.
  """
  language_model = language_model_lib.load(
    source.workdir, num_loops=source.loops, checkpoint=source.checkpoint
  )
  exit_by, read = how_it_exits(source.settings)

  @jax.jit
  def forward(params: Any, inputs: Array) -> Any:
    model: Any = nnx.merge(language_model.graphdef, params)
    found = read(model, inputs[None], source.loops)
    probabilities = jax.nn.softmax(found.logits)
    best = jax.lax.top_k(probabilities, NUM_CANDIDATES)
    following = jnp.broadcast_to(jnp.roll(inputs, -1), probabilities.shape[:2])
    losses = token_losses.token_cross_entropy(found.logits, following)
    return best, losses, (found.depth, found.readout, found.lens)

  tokenizer = language_model.tokenizer
  most = language_model.context_length
  inspect = functools.partial(
    _inspect, language_model, functools.partial(forward, language_model.params)
  )

  @functools.cache
  def engine() -> Any:
    return source_lib.make_engine(language_model, num_slots=1, max_tokens=most)

  def written(ids: tuple[int, ...], num: int, seed: int) -> tuple[int, ...]:
    """Token ids and those that the model continues them with."""
    num = min(num, most - len(ids))
    if num < 1:
      return ids
    sampling = Sampling(temperature=0.8, seed=seed)
    stops = language_model.stop_tokens
    request = GenerationRequest(ids, num, sampling, stop_tokens=stops)
    (tokens,) = engine().generate([request])
    return *ids, *(one.token for one in tokens if one.finish != "stop")

  def of_prompt(prompt: str) -> Inspection:
    ids = tokenizer.encode_prompt(prompt)
    return inspect(prompt, written(ids, _WRITTEN, 0), len(ids))

  def random(seed: int, level: str) -> Inspection:
    del level  # There is none.
    ids = written((tokenizer.begin,), _RANDOM_TOKENS - 1, seed)
    # Their text may be read as other tokens, or be no valid UTF-8.
    return inspect(tokenizer.decode(ids[1:]), ids, 1)

  return Inspector(
    view="text",
    facts=facts(
      source,
      language_model.facts["step"],
      exits=exit_by,
      thresholds=THRESHOLDS if exit_by else (1.0,),
    ),
    inspect=of_prompt,
    random=random,
  )


def how_it_exits(settings: config_lib.Settings) -> tuple[str, Read]:
  """How tokens exit, "gate", "mass" or "", and the function for readings."""
  family = settings.family
  if family.halting_trace:
    return "mass", by_mass
  exits_early = family.reading and family.reading.exits
  if exits_early and exits_early.rule(settings.model) == "gate":
    return "gate", by_gate
  return "", by_loop


def by_gate(model: Any, inputs: Array, loops: int) -> Readings:
  """For a model with an exit gate; k loops are the first of K loops."""
  output = model(inputs, num_loops=loops, trace=("hidden",))
  hidden = output.trace["hidden"][:, 0]
  first = [exits.first_exit(model.exit_logits(hidden), q) for q in THRESHOLDS]
  most = jnp.arange(loops)[:, None, None]
  readout = jnp.minimum(jnp.stack(first)[None], most)
  lens = jnp.broadcast_to(most[..., 0], (loops, len(THRESHOLDS)))
  return Readings(
    model.logits(hidden), 1.0 + readout.astype(jnp.float32), readout, lens
  )


def by_mass(model: Any, inputs: Array, loops: int) -> Readings:
  """For a model whose layers loop: depth is E[n], the mean over its layers."""
  logits, depth = [], []
  for count in range(1, loops + 1):

    def run(threshold: Array, count: int = count) -> tuple[Array, Array]:
      output = model(
        inputs, num_loops=count, exit_threshold=threshold, trace=("halting",)
      )
      halting = output.trace["halting"][:, 0]  # [k, T, L]
      steps = jnp.arange(1, count + 1, dtype=halting.dtype)
      expected = jnp.einsum("k,ktl->tl", steps, halting)
      return output.logits[0], jnp.mean(expected, axis=-1)

    of_count = jax.lax.map(run, jnp.asarray(THRESHOLDS))
    logits.append(of_count[0])
    depth.append(of_count[1])
  num = len(THRESHOLDS)
  lens = jnp.arange(loops * num).reshape(loops, num)
  readout = jnp.broadcast_to(lens[..., None], (*lens.shape, inputs.shape[1]))
  return Readings(jnp.concatenate(logits), jnp.stack(depth), readout, lens)


def by_loop(model: Any, inputs: Array, loops: int) -> Readings:
  """For a model without exits: every token runs the same number of loops."""
  counts = range(1, loops + 1)
  logits = [model(inputs, num_loops=count).logits[0] for count in counts]
  lens = jnp.arange(loops)[:, None]
  readout = jnp.broadcast_to(lens[..., None], (loops, 1, inputs.shape[1]))
  depth = 1.0 + readout.astype(jnp.float32)
  return Readings(jnp.stack(logits), depth, readout, lens)


def _inspect(
  language_model: language_model_lib.LanguageModel,
  forward: Callable[[np.ndarray], Any],
  prompt: str,
  ids: tuple[int, ...],
  start: int,
) -> Inspection:
  """A text, given with its token ids, as the model reads it.

  Args:
    language_model: the model, with its tokenizer.
    forward: from padded token ids to what the model reads.
    prompt: the text that was asked for.
    ids: token ids of the prompt and of what the model wrote.
    start: the first of them that the model wrote.

  Returns:
    "prompt"; "start"; "answer", of a sum the text that is right, otherwise "";
    "tokens", T texts, empty for what texts begin with; "depth" in
    hundredths of loops, "readout" and "lens" as in `Readings`; "candidates"
    [C][T], the most likely next tokens, pairs of text and probability in
    thousandths; "surprise" [C][T - 1], of the text's own next token, in
    hundredths of nats.
  """
  tokenizer = language_model.tokenizer
  num = len(ids)
  if num > language_model.context_length:
    raise UserError(
      f"the text has {num} tokens, more than the model's context length of"
      f" {language_model.context_length}"
    )
  size = _SMALLEST
  while size < num:
    size *= 2
  size = max(num, min(size, language_model.context_length))
  inputs = np.full(size, tokenizer.padding, np.int32)
  inputs[:num] = ids
  begun = int(ids[0] == tokenizer.begin)
  best, losses, (depth, readout, lens) = jax.device_get(forward(inputs))
  probabilities, candidates = (x[:, :num] for x in best)

  @functools.cache
  def text_of(token: int) -> str:
    text = token_texts(tokenizer, [token])[0]
    if text and "\N{REPLACEMENT CHARACTER}" not in text:
      return text
    part = tokenizer.piece(token)  # Of a character, or of no text at all.
    return f"<0x{part.hex().upper()}>" if part else f"<{token}>"

  def pairs(tokens: np.ndarray, probabilities: np.ndarray) -> list[list[Any]]:
    shown = map(text_of, tokens.tolist())
    share = np.rint(1000 * probabilities).astype(int).tolist()
    return [list(pair) for pair in zip(shown, share, strict=True)]

  return {
    "prompt": prompt,
    "start": start,
    "answer": answer_of(tokenizer.decode(ids[begun:])),
    "tokens": [*([""] if begun else []), *token_texts(tokenizer, ids[begun:])],
    "depth": np.rint(100 * depth[..., :num]).astype(int).tolist(),
    "readout": readout[..., :num].tolist(),
    "lens": lens.tolist(),
    "candidates": [
      [pairs(*place) for place in zip(*of_readout, strict=True)]
      for of_readout in zip(candidates, probabilities, strict=True)
    ],
    "surprise": np.rint(100 * losses[:, : num - 1]).astype(int).tolist(),
  }


def answer_of(text: str) -> str:
  """The right text of a sum, "3+4+8=15", or with steps "3+4+8=7,15".

  "" unless the text begins with a sum and its equals sign.
  """
  found = _SUM.match(text)
  if not found:
    return ""
  terms = [int(term) for term in found[0][:-1].split("+")]
  sums = [*itertools.accumulate(terms)][1:]
  steps = sums if "," in text[found.end() :] else sums[-1:]
  return found[0] + ",".join(map(str, steps))


def token_texts(tokenizer: Any, ids: Sequence[int]) -> list[str]:
  """The text of each token, the end of a document as a sign of its own.

  A split character belongs to its last token.
  """
  texts: list[str] = []
  waiting: list[int] = []
  for token in ids:
    if token == tokenizer.end:
      texts.append("¶")
      waiting = []
      continue
    waiting.append(token)
    text = tokenizer.decode(waiting)
    whole = not text.endswith("\ufffd") or len(waiting) == 4
    texts.append(text if whole else "")
    waiting = [] if whole else waiting
  if waiting:  # An incomplete character.
    texts[-1] = tokenizer.decode(waiting)
  return texts
