"""Predictions of a trained model for a multi-hop question, in every loop.

The logit lens of one question: logits at every position after every loop, as in
`loopjax.analysis.multihop`.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from loopjax.analysis import evaluated as evaluated_lib
from loopjax.data.multihop import chains, language, task
from loopjax.data.multihop.task import Config
from loopjax.errors import UserError, similar
from loopjax.play.page import Inspection, Inspector, Source, facts
from loopjax.saved import trained
from loopjax.types import Array

NUM_CANDIDATES = 5
_LINE_END = "↵"  # In the place of the token "\n", which no field can hold.
# Random questions, by a part of the name of their split.
LEVELS = {
  "single facts": "atom",
  "composed as in training": "test_id",
  "never composed in training": "test_ood",
}


class Question(NamedTuple):
  """A parsed multi-hop question.

  Attributes:
    ids: token ids, int [T].
    entities: ids of the first entity and the entity after each hop, as far as
      the facts define them.
    relations: ids of the relation of each hop.
    places: the position at which each hop is determined.
  """

  ids: np.ndarray
  entities: tuple[int, ...]
  relations: tuple[int, ...]
  places: tuple[int, ...]


def load(source: Source) -> Inspector:
  """The inspector of a run on multi-hop questions."""
  settings, config = source.settings, source.settings.task
  assert isinstance(config, Config)  # As the caller has found.
  run = trained.read(source.workdir, source.checkpoint)
  names = names_of(config)
  test = task.make_dataset(
    config, "test", batch_size=settings.eval.batch_size, seed=0
  )
  batch = evaluated_lib.sample(test, 0)
  padding = config.vocabulary.padding
  known = {
    tuple(row[row < padding].tolist()): test.groups["split"][split]
    for row, split in zip(batch["inputs"], batch["group/split"], strict=True)
  }

  @jax.jit
  def forward(params: Any, inputs: Array) -> Any:
    model: Any = nnx.merge(run.graphdef, params)
    # Stage k is the answer of a run of k loops (DiscoLoop, section 3.2).
    stages = [
      model(inputs[None], num_loops=loop).logits[0]
      for loop in range(1, source.loops + 1)
    ]
    probabilities = jax.nn.softmax(jnp.stack(stages))
    return jax.lax.top_k(probabilities, min(NUM_CANDIDATES, padding))

  inspect = functools.partial(
    _inspect,
    config,
    task.make_graph(config),
    names,
    known,
    functools.partial(forward, run.params),
  )

  by_level = {
    level: [ids for ids, split in known.items() if part in split]
    for level, part in LEVELS.items()
  }

  def random(seed: int, level: str) -> Inspection:
    questions = by_level[level]
    chosen = questions[np.random.default_rng(seed).integers(len(questions))]
    return inspect(" ".join(names[token] for token in chosen))

  return Inspector(
    view="questions",
    facts=facts(
      source,
      run.step,
      [level for level, questions in by_level.items() if questions],
      format=config.format,
    ),
    inspect=inspect,
    random=random,
  )


def names_of(config: Config) -> list[str]:
  """The text of every token: people and relations, where there are enough."""
  symbols = [
    task.decode(config, [token]).replace("\n", _LINE_END)
    for token in range(config.vocabulary.padding)
  ]
  num, relations = config.vocabulary.num_entities, config.num_relations
  if config.format != "symbolic" or num > len(language.NAMES):
    return symbols
  if relations > len(language.RELATIONS):
    return symbols
  return [*language.NAMES[:num], *language.RELATIONS[:relations]]


def parse(
  config: Config, facts: chains.Graph, names: list[str], question: str
) -> Question:
  """A question, and what the facts answer.

  Raises:
    UserError: a word is not a token, or the words are not a question.
  """
  ids_of = {name: token for token, name in enumerate(names)}
  said = question.split()
  for word in said:
    if word not in ids_of:
      raise UserError(
        f"{word!r} is not a word of this task{similar(word, ids_of)}"
      )
  ids = [ids_of[word] for word in said]
  vocabulary = config.vocabulary
  for hops in range(1, config.max_hops + 1):
    layout = language.layout(config.format, hops)
    if _fits(vocabulary, layout, ids):
      entities = [ids[layout.index(0)]]
      for hop in range(1, hops + 1):
        relation = ids[layout.index(hop)] - vocabulary.num_entities
        found = np.flatnonzero(
          (facts.heads == entities[-1]) & (facts.relations == relation)
        )
        if not len(found):
          break
        entities.append(int(facts.tails[found[0]]))
      relations = tuple(ids[layout.index(hop)] for hop in range(1, hops + 1))
      places = language.hop_positions(config.format, hops)
      return Question(
        np.array(ids, np.int32), tuple(entities), relations, places
      )
  example = language.layout(config.format, config.max_hops)
  raise UserError(
    f"{question!r} is not a question; expected the form "
    + " ".join(_word(what) for what in example)
  )


def _fits(
  vocabulary: language.Vocabulary, layout: tuple[int | str, ...], ids: list[int]
) -> bool:
  """Whether tokens are laid out like this."""

  def kind(token: int) -> str:
    if token < vocabulary.num_entities:
      return "entity"
    relation = token < vocabulary.num_entities + vocabulary.num_relations
    return "relation" if relation else "word"

  if len(ids) != len(layout):
    return False
  for what, token in zip(layout, ids, strict=True):
    if isinstance(what, str):
      if token != vocabulary.word(what):
        return False
    elif kind(token) != ("relation" if what else "entity"):
      return False
  return True


def _word(what: int | str) -> str:
  """A place of a layout, for a message."""
  if isinstance(what, str):
    return what.replace("\n", _LINE_END)
  return f"RELATION{what}" if what else "ENTITY"


def _inspect(
  config: Config,
  facts: chains.Graph,
  names: list[str],
  known: Mapping[tuple[int, ...], str],
  forward: Callable[[np.ndarray], Any],
  question: str,
) -> Inspection:
  """A question in the loops of the model.

  Returns:
    "prompt"; "asks", the question in words; "tokens" [T]; "entities", names of
    the first one and of that after each hop, as far as there are facts;
    "places", the position at which each hop is determined; "split" of the task,
    "" for a question of none;
    "candidates" [K][T], the most likely symbols, pairs of name and probability
    in thousandths.
  """
  parsed = parse(config, facts, names, question)
  inputs = np.full(config.sequence_length, config.vocabulary.padding, np.int32)
  num = len(parsed.ids)
  inputs[:num] = parsed.ids
  probabilities, tokens = jax.device_get(forward(inputs))
  share = np.rint(1000 * probabilities).astype(int)
  return {
    "prompt": " ".join(names[token] for token in parsed.ids),
    "asks": "'s ".join(
      names[token] for token in (parsed.entities[0], *parsed.relations)
    ),
    "tokens": [names[token] for token in parsed.ids],
    "entities": [names[token] for token in parsed.entities],
    "places": list(parsed.places),
    "split": known.get(tuple(parsed.ids.tolist()), ""),
    "candidates": [
      [
        [
          [names[token] if token < len(names) else "", int(chance)]
          for token, chance in zip(tokens[k, t], share[k, t], strict=True)
        ]
        for t in range(num)
      ]
      for k in range(len(tokens))
    ],
  }
