"""The knowledge task: facts about people, stated in training, then queried.

Training has biographies of all people, and questions about some of them.
Evaluation asks about the others: a model has to extract facts about people for
whom extraction was never trained (Physics of Language Models 3.1, arXiv
2309.14316). The loss on statements measures how much the model stores (3.3,
arXiv 2404.05405, there in bits per parameter).

People are made up. The values of a person are drawn independently and
uniformly, except that the employer determines the work city (bioS).
"""

import dataclasses
import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from loopjax import checks
from loopjax.data import pipeline
from loopjax.data.knowledge import language
from loopjax.errors import UserError
from loopjax.losses import tokens as token_losses
from loopjax.types import Array, Batch, Dataset, Output, TaskSpec

NUM_NAMES = math.prod(len(language.VALUES[kind]) for kind in language.NAME)
_NAMES, _VALUES, _WORK_CITIES = range(3)  # Streams of random numbers.


class People(NamedTuple):
  """N people, as token ids.

  Attributes:
    names: int [N, 3].
    pronouns: int [N].
    values: values of all attributes, int [N, attributes, 3], ABSENT where a
      value is shorter.
  """

  names: np.ndarray
  pronouns: np.ndarray
  values: np.ndarray


def draw_people(seed: int, numbers: np.ndarray) -> People:
  """The people with these numbers, int [N], below NUM_NAMES; names differ."""
  names = np.empty((len(numbers), len(language.NAME)), np.int64)
  remaining = pipeline.shuffled(numbers, NUM_NAMES, _NAMES, seed)
  for column, kind in enumerate(language.NAME):
    remaining, name = np.divmod(remaining, len(language.VALUES[kind]))
    names[:, column] = _token(kind, name)
  attributes = [a for n, a in language.ATTRIBUTES.items() if n != "work_city"]
  kinds = [kind for attribute in attributes for kind in attribute.kinds]
  chosen = pipeline.uniforms(
    pipeline.stream_seed(_VALUES, seed), numbers, len(kinds) + 1
  )
  shape = (len(numbers), len(language.ATTRIBUTES), language.NUM_VALUE_TOKENS)
  values = np.full(shape, language.ABSENT)
  column = 0
  for attribute_index, attribute in enumerate(attributes):
    for place, kind in enumerate(attribute.kinds):
      index = _index(chosen[:, column], kind)
      values[:, attribute_index, place] = _token(kind, index)
      column += 1
  values[:, -1, 0] = _token("city", work_cities(seed)[index])
  pronoun = (chosen[:, -1] * len(language.PRONOUNS)).astype(np.int64)
  ids = [language.vocabulary().words[word] for word in language.PRONOUNS]
  return People(names, np.array(ids)[pronoun], values)


def work_cities(seed: int) -> np.ndarray:
  """The city of every employer, int [employers]."""
  employers = np.arange(len(language.VALUES["employer"]))
  stream = pipeline.stream_seed(_WORK_CITIES, seed)
  return _index(pipeline.uniforms(stream, employers, 1)[:, 0], "city")


def biography_bits() -> dict[str, float]:
  """Information that a biography contains, in bits, by attribute.

  This is the base-2 logarithm of the number of values, and 0 for the work city,
  which the employer determines. The paper's attributes sum to 47.6 bits.
  """
  bits = {
    name: math.log2(math.prod(len(language.VALUES[k]) for k in attribute.kinds))
    for name, attribute in language.ATTRIBUTES.items()
  }
  pronoun = math.log2(len(language.PRONOUNS))
  return {**bits, "work_city": 0.0, "pronoun": pronoun}


def _index(uniform: np.ndarray, kind: str) -> np.ndarray:
  return (uniform * len(language.VALUES[kind])).astype(np.int64)


def _token(kind: str, index: np.ndarray) -> np.ndarray:
  return language.vocabulary().starts[kind] + index


TRACES: tuple[str, ...] = ()  # `score` uses no trace.
HEADLINE = ("exact_match",)
_ATTRIBUTES = tuple(language.ATTRIBUTES)
_TRAINING, _EVALUATED, _PHRASES = range(3)  # Streams of random numbers.


@dataclasses.dataclass(frozen=True)
class Config:
  """Numbers of people and questions.

  Attributes:
    num_people: N; all their biographies are in the training data.
    asked_share: share of the people with questions in training; of the others,
      half are for validation and half for the test.
    question_share: share of the training documents that are questions with
      their answers; the others are biographies.
    sequence_length: tokens of a row. Training fills it with documents and
      truncates the last one; evaluation has one document per row.
    num_eval_people: number of people whose attributes are scored, for each of
      statements, trained questions and held-out questions.
    people_seed: seed of the people; their order in training depends on the
      run's seed.
  """

  num_people: int = 100_000
  asked_share: float = 0.5
  question_share: float = 0.5
  sequence_length: int = 512
  num_eval_people: int = 500
  people_seed: int = 0

  def __post_init__(self) -> None:
    checks.plain_values("task", self)
    checks.at_least(
      "task",
      self,
      num_people=3,
      sequence_length=language.MAX_SENTENCE + 1,  # With the end token.
      num_eval_people=1,
      people_seed=0,
    )
    if self.num_people > NUM_NAMES:
      raise UserError(
        f"task.num_people={self.num_people}: only {NUM_NAMES} names exist"
      )
    checks.within("task", self, asked_share="(0, 1)", question_share="(0, 1)")
    fewest = min(len(part) for part in self.parts.values())
    if self.num_eval_people > fewest:
      raise UserError(
        f"task.num_eval_people={self.num_eval_people} exceeds the {fewest} "
        f"people in the smallest part; see task.num_people={self.num_people} "
        f"and task.asked_share={self.asked_share}"
      )

  @property
  def parts(self) -> dict[str, range]:
    """The people with questions in each split; the ranges are disjoint."""
    num_asked = round(self.asked_share * self.num_people)
    middle = num_asked + (self.num_people - num_asked) // 2
    return {
      "train": range(num_asked),
      "validation": range(num_asked, middle),
      "test": range(middle, self.num_people),
    }


def spec(config: Config) -> TaskSpec:
  """Vocabulary, and the length of a row."""
  vocabulary = language.vocabulary()
  return TaskSpec(
    vocab_size=vocabulary.size,
    sequence_length=config.sequence_length,
    num_padding_tokens=vocabulary.size - vocabulary.padding,
    packs_documents=True,
    predicts_next=True,
  )


def abstract_batch(config: Config, batch_size: int) -> pipeline.Shapes:
  """Shapes and dtypes of a training batch, without making the data."""
  return pipeline.abstract_rows(
    batch_size, config.sequence_length, integers=("documents",)
  )


def make_dataset(
  config: Config,
  split: str,
  *,
  batch_size: int,
  seed: int,
  rows: pipeline.Rows | None = None,
) -> Dataset:
  """Batches of a split.

  Returns:
    Batches of `abstract_batch`'s entries; "documents" are numbered 1, 2, ...,
    with 0 for padding. Training predicts all tokens. In evaluation a row has
    one document, weights are 1 only for the value, and there are "valid" bool
    [b], "group/split" and "group/attribute" i32 [b]. The facts include the bits
    of knowledge in all biographies.
  """
  bits = biography_bits()
  facts: dict[str, int | float | str] = {
    "bits_per_person": sum(bits.values()),
    "knowledge_bits": sum(bits.values()) * config.num_people,
    **{f"{name}_bits": value for name, value in bits.items()},
  }
  if split == "train":
    stream = pipeline.stream_seed(_TRAINING, seed)
    batches = pipeline.stream(
      lambda positions: _training_rows(config, stream, positions),
      batch_size,
      rows,
    )
    return Dataset(batches, facts=facts)
  trained = config.parts["train"]
  parts = {
    "train_statements": range(config.num_people),
    "train_questions": trained,
    f"{split}_questions": config.parts[split],
  }
  num_examples = len(parts) * len(_ATTRIBUTES) * config.num_eval_people
  batches = pipeline.evaluation_batches(
    lambda examples, _: _evaluation_rows(
      config, tuple(parts.values()), examples
    ),
    num_examples,
    batch_size,
    rows,
  )
  names = tuple(f"{part}/{name}" for part in parts for name in _ATTRIBUTES)
  facts[f"{split}_examples"] = num_examples
  return Dataset(batches, {"split": tuple(parts), "attribute": names}, facts)


def score(output: Output, batch: Batch) -> dict[str, Array]:
  """Per-example scores, f32 [B].

  "exact_match": all tokens of the value are correct; "loss": its cross-entropy
  in nats. A model's knowledge of an attribute, in bits, is the attribute's
  information ("birth_city_bits", ... of the facts) minus loss / ln 2; it is
  stored if the model completes statements, and extractable if it answers
  held-out questions.
  """
  losses, right, weights = token_losses.graded(output, batch)
  num_wrong = jnp.sum(weights * (1 - right), axis=1)
  return {
    "exact_match": (num_wrong == 0).astype(jnp.float32),
    "loss": jnp.sum(losses * weights, axis=1),
  }


def _training_rows(
  config: Config, stream: int, positions: np.ndarray
) -> dict[str, np.ndarray]:
  """Rows [b, T] filled with documents."""
  num = -(-config.sequence_length // (language.MIN_QUESTION + 1))
  places = (positions[:, None] * num + np.arange(num)).ravel()
  num_attributes = len(_ATTRIBUTES)
  which, who, what, *rest = pipeline.uniforms(
    stream, places, 3 + 2 * num_attributes
  ).T
  order = np.argsort(np.stack(rest[:num_attributes], axis=1), axis=1)
  phrases = np.stack(rest[num_attributes:], axis=1) * language.NUM_PHRASES
  is_question = which < config.question_share
  num_people = np.where(
    is_question, len(config.parts["train"]), config.num_people
  )
  people = draw_people(config.people_seed, (who * num_people).astype(np.int64))
  tokens = language.biographies(
    people.names,
    people.pronouns,
    people.values,
    order,
    phrases.astype(np.int64),
  )
  attributes = (what * num_attributes).astype(np.int64)
  questions, _ = language.questions(
    people.names, attributes, people.values[np.arange(len(places)), attributes]
  )
  tokens[is_question] = language.ABSENT
  tokens[is_question, : questions.shape[1]] = questions[is_question]
  tokens = tokens.reshape(len(positions), num, -1)
  return _rows(config, tokens, np.ones(tokens.shape, bool), True)


def _evaluation_rows(
  config: Config, parts: tuple[range, ...], examples: np.ndarray
) -> dict[str, np.ndarray]:
  """Rows [b, T] of one document each, cycling through parts and attributes."""
  remaining, split = np.divmod(examples, len(parts))
  places, attributes = np.divmod(remaining, len(_ATTRIBUTES))
  numbers = np.empty(len(examples), np.int64)
  for number, part in enumerate(parts):
    in_part = split == number
    numbers[in_part] = part.start + pipeline.shuffled(
      places[in_part], len(part), _EVALUATED, config.people_seed, number
    )
  people = draw_people(config.people_seed, numbers)
  values = people.values[np.arange(len(examples)), attributes]
  stream = pipeline.stream_seed(_PHRASES, config.people_seed)
  phrases = pipeline.uniforms(stream, examples, 1)[:, 0] * language.NUM_PHRASES
  statements, value = language.sentences(
    people.names, attributes, phrases.astype(np.int64), values
  )
  tokens = np.full(statements.shape, language.ABSENT)
  counted = np.broadcast_to(value, statements.shape).copy()
  questions, value = language.questions(people.names, attributes, values)
  is_question, width = split > 0, questions.shape[1]
  tokens[~is_question] = statements[~is_question]
  tokens[is_question, :width] = questions[is_question]
  counted[is_question] = False
  counted[is_question, :width] = value
  batch = _rows(config, tokens[:, None], counted[:, None], False)
  return {
    **batch,
    "group/split": split.astype(np.int32),
    "group/attribute": (split * len(_ATTRIBUTES) + attributes).astype(np.int32),
  }


def _rows(
  config: Config, tokens: np.ndarray, counted: np.ndarray, count_ends: bool
) -> dict[str, np.ndarray]:
  """Concatenates documents with their end tokens into rows; truncates the last.

  Args:
    tokens: tokens of the documents of each row, int [b, documents, W].
    counted: which tokens have weight 1, bool [b, documents, W].
    count_ends: whether end tokens have weight 1.
  """
  vocabulary, length = language.vocabulary(), config.sequence_length
  batch, num, _ = tokens.shape
  ends = np.full((batch, num, 1), vocabulary.end)
  tokens = np.concatenate([tokens, ends], axis=2)
  counted = np.concatenate(
    [counted, np.full((batch, num, 1), count_ends)], axis=2
  )
  numbers = np.broadcast_to(np.arange(1, num + 1)[:, None], tokens.shape)
  tokens, counted, numbers = (
    x.reshape(batch, -1) for x in (tokens, counted, numbers)
  )
  present = tokens != language.ABSENT
  present &= np.cumsum(present, axis=1) <= length
  targets = pipeline.in_a_row(tokens, present, length, 0)
  weights = pipeline.in_a_row(counted, present, length, False)
  documents = pipeline.in_a_row(numbers, present, length, 0)
  before = np.full((batch, 1), vocabulary.end)  # As if a document preceded.
  inputs = np.concatenate([before, targets[:, :-1]], axis=1)
  inputs = np.where(documents > 0, inputs, vocabulary.padding)
  return {
    "inputs": inputs.astype(np.int32),
    "targets": targets.astype(np.int32),
    "weights": weights.astype(np.float32),
    "documents": documents.astype(np.int32),
  }
