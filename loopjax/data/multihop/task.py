"""The multi-hop task: answer a r1 ... rk directly, from facts in the weights.

Single facts and chains of facts are separate examples. Training uses some
chains of graph A and none of graph B (DiscoLoop, arXiv 2607.00341, section 2).
"""

import dataclasses
from collections.abc import Iterable, Mapping

import jax.numpy as jnp
import numpy as np

from loopjax import checks
from loopjax.data import pipeline
from loopjax.data.multihop import chains, language
from loopjax.errors import UserError
from loopjax.losses import tokens as token_losses
from loopjax.types import Array, Batch, Dataset, Output, TaskSpec


@dataclasses.dataclass(frozen=True)
class Config:
  """Sizes of the graphs, and numbers of chains.

  The defaults are the paper's two-hop task (section 3.1). Its three-hop task
  (appendix A.2) has num_train_chains=(5000, 5000), num_test_chains=(1000, 1000)
  and three loops; (5000, 5000, 0) and (1000, 1000, 1000) also test four hops
  that no training chain has.

  Attributes:
    num_entities: E, entities of each graph.
    num_relations: R, number of relations, shared by both graphs.
    out_degree: D, facts per entity, with distinct relations.
    num_train_chains: chains of A to train on, with 2, 3, ... hops.
    num_test_chains: test chains of A, and of B, with 2, 3, ... hops; the same
      numbers of other chains are for validation.
    num_fact_repeats: an epoch has every training chain once and every single
      fact this many times (the paper: 1). With more repeats, facts are learned
      before chains, which makes composing a chain easier than memorising it.
    num_scored_train: chains of each training split that evaluation scores,
      drawn by split_seed; 0 for all.
    format: "symbolic", one token per entity and relation; or English, "direct"
      (Finley's teacher's wife is) or "reverse" (Who is the wife of the teacher
      of Finley?), section 5.2.
    vocab_multiple: the vocabulary is padded to a multiple of this.
    graph_seed: seed of the facts.
    split_seed: seed of the choice of chains. Their order depends on the run's
      seed.
  """

  num_entities: int = checks.setting(500, least=1)
  num_relations: int = checks.setting(50, least=1)
  out_degree: int = checks.setting(10, least=1)
  num_train_chains: tuple[int, ...] = (10_000,)
  num_test_chains: tuple[int, ...] = (2_000,)
  num_fact_repeats: int = checks.setting(1, least=1)
  num_scored_train: int = checks.setting(2_000, least=0)
  format: str = "symbolic"
  vocab_multiple: int = checks.setting(1, least=1)
  graph_seed: int = checks.setting(0, least=0)
  split_seed: int = checks.setting(0, least=0)

  def __post_init__(self) -> None:
    checks.plain_values("task", self)
    checks.one_of("task", self, format=language.FORMATS)
    if self.out_degree > self.num_relations:
      raise UserError(
        f"task.out_degree={self.out_degree} is greater than "
        f"task.num_relations={self.num_relations}: the relations of an entity "
        "must be distinct"
      )
    self._check_counts()
    if self.format != "symbolic":
      _check_words("num_relations", self.num_relations, 1, language.RELATIONS)
      _check_words("num_entities", self.num_entities, 2, language.NAMES)

  def _check_counts(self) -> None:
    train, test = self.num_train_chains, self.num_test_chains
    for name, counts in (("train", train), ("test", test)):
      if not all(type(count) is int and count >= 0 for count in counts):
        raise UserError(
          f"task.num_{name}_chains={counts} must be non-negative counts, one "
          "per number of hops, starting at 2"
        )
    if not train or len(train) != len(test):
      raise UserError(
        f"task.num_train_chains={train} and task.num_test_chains={test} must "
        "have the same length: one count for each of 2, 3, ... hops"
      )
    for hops, (n_train, n_test) in enumerate(
      zip(train, test, strict=True), start=2
    ):
      available = chains.num_chains(self.num_entities, self.out_degree, hops)
      requested = n_train + 2 * n_test
      if requested > available:
        raise UserError(
          f"task.num_train_chains={train} and task.num_test_chains={test} "
          f"(used for validation and for test) request {requested} chains of "
          f"{hops} hops, but a graph has {available}"
        )
      if available > np.iinfo(np.int64).max:
        raise UserError(
          f"task.num_train_chains={train}: the {self.num_entities} *"
          f" {self.out_degree}**{hops} chains of {hops} hops cannot be numbered"
          " in 63 bits"
        )

  @property
  def max_hops(self) -> int:
    return 1 + len(self.num_train_chains)

  @property
  def sequence_length(self) -> int:
    """Tokens of the longest question, without the answer."""
    return len(language.layout(self.format, self.max_hops))

  @property
  def vocabulary(self) -> language.Vocabulary:
    return language.Vocabulary(
      num_entities=2 * self.num_entities,
      num_relations=self.num_relations,
      format=self.format,
      multiple=self.vocab_multiple,
    )


def _check_words(
  name: str, num: int, graphs: int, available: tuple[str, ...]
) -> None:
  """Raises UserError if there are fewer words than needed."""
  if num * graphs > len(available):
    raise UserError(
      f"task.{name}={num} in English must be at most {len(available) // graphs}"
    )


# Per-loop traces that `score` uses, if a model has them.
TRACES = ("prediction",)
HEADLINE = ("accuracy",)
# Keys of the streams in `chains` end in a number of hops; the graph's does not.
_GRAPH_STREAM = 4


def spec(config: Config) -> TaskSpec:
  """Vocabulary, and the length of the longest question."""
  vocabulary = config.vocabulary
  return TaskSpec(
    vocab_size=vocabulary.size,
    sequence_length=config.sequence_length,
    num_padding_tokens=vocabulary.size - vocabulary.padding,
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

  Questions begin at position 0, with padding after them. The answer is the
  target at the last token of the question, the only position with a nonzero
  weight; other targets are 0.

  Returns:
    Batches of `abstract_batch`'s entries. Evaluation adds "valid" bool [b];
    "bridges" i32 [b, T], at index j the entity after hop j, at j = k the
    answer, and -1 elsewhere (in the symbolic format j is also its position);
    "group/split" i32 [b]; and "group/role_exposure" i32 [b]: which facts of a
    held-out chain of A were composed in the same position in training, or -1
    for other examples (none of a B chain's facts were, all of a training
    chain's).
  """
  facts, splits = _splits(config)
  seen_roles = chains.seen_roles(facts, splits, config.max_hops)
  if split == "train":
    chosen = {n: c for n, c in splits.items() if n.startswith("train_")}
  else:
    chosen = chains.scored(
      splits, split, config.num_scored_train, config.split_seed
    )
  names = tuple(splits)
  table, roles = _table(config, facts, chosen, names, seen_roles)
  num_examples = len(table["inputs"])

  if split == "train":
    is_fact = table["group/split"] == names.index("train_atom")
    repeats = np.where(is_fact, config.num_fact_repeats, 1)
    epoch = np.repeat(np.arange(num_examples), repeats)
    table = {name: table[name] for name in abstract_batch(config, batch_size)}
    batches = pipeline.training_batches(
      lambda places, _: _take(table, epoch[places]),
      len(epoch),
      batch_size,
      seed,
      rows,
    )
  else:
    # Shuffles the splits together: any prefix is a fair sample.
    batches = pipeline.evaluation_batches(
      lambda places, _: _take(
        table, pipeline.shuffled(places, num_examples, 0)
      ),
      num_examples,
      batch_size,
      rows,
    )
  return Dataset(
    batches=batches,
    groups={"split": names, "role_exposure": roles},
    facts={
      f"{split}_examples": num_examples,
      **{f"{name}_size": len(part) for name, part in splits.items()},
      "split_sha256": chains.digest(facts, splits),
    },
  )


def abstract_batch(config: Config, batch_size: int) -> pipeline.Shapes:
  """Shapes and dtypes of a training batch; T fits the longest question."""
  return pipeline.abstract_rows(batch_size, config.sequence_length)


def score(output: Output, batch: Batch) -> dict[str, Array]:
  """Per-example scores, f32 [B].

  "accuracy": the most likely token is the answer; "loss": cross-entropy of the
  answer, in nats; if the model has a prediction after every loop,
  "stage<k>_accuracy": loop k predicts the answer (table 1 and figure 3).
  """
  losses, predicted = token_losses.scores(output, batch["targets"])
  scores = {
    "accuracy": stage_accuracy(predicted[None], batch)[0],
    "loss": jnp.sum(losses * batch["weights"], axis=1),
  }
  if "prediction" in output.trace:
    stages = stage_accuracy(output.trace["prediction"], batch)
    for stage, accuracy in enumerate(stages, start=1):
      scores[f"stage{stage}_accuracy"] = accuracy
  return scores


def stage_accuracy(predictions: Array, batch: Batch) -> Array:
  """Whether each loop predicts the answer at the last token of the question.

  Args:
    predictions: token ids after every loop, int [K, B, T].
    batch: has "targets" and "weights" [B, T].

  Returns:
    f32 [K, B], 1 or 0.
  """
  correct = (predictions == batch["targets"][None]).astype(jnp.float32)
  return jnp.sum(correct * batch["weights"][None], axis=-1)


def hop_positions(config: Config, hops: int) -> tuple[int, ...]:
  """Positions in a question at which the entity after each hop is determined.

  Returns:
    For every hop, the first position that sees everything on which it depends:
    j in the symbolic format, the relation in the direct format; in the reverse
    format, for all hops, the first entity, which comes last.
  """
  return language.hop_positions(config.format, hops)


def decode(config: Config, ids: Iterable[int]) -> str:
  """Token ids as readable text, without padding."""
  return language.decode(config.vocabulary, ids)


def make_graph(config: Config) -> chains.Graph:
  """Both graphs of a task; identical in every process."""
  return chains.make_graph(
    config.num_entities,
    config.num_relations,
    config.out_degree,
    np.random.default_rng((_GRAPH_STREAM, config.graph_seed)),
  )


def _take(
  table: Mapping[str, np.ndarray], examples: np.ndarray
) -> dict[str, np.ndarray]:
  """Some rows of all entries."""
  return {name: value[examples] for name, value in table.items()}


def _splits(config: Config) -> tuple[chains.Graph, dict[str, np.ndarray]]:
  """Both graphs and all splits; identical in every process."""
  facts = make_graph(config)
  splits = chains.make_splits(
    facts, config.num_train_chains, config.num_test_chains, config.split_seed
  )
  return facts, splits


def _table(
  config: Config,
  facts: chains.Graph,
  chosen: Mapping[str, np.ndarray],
  names: tuple[str, ...],
  seen_roles: np.ndarray,
) -> tuple[dict[str, np.ndarray], tuple[str, ...]]:
  """Concatenates the examples of splits, with the groups by role exposure.

  Args:
    facts: both graphs.
    chosen: chains by split.
    names: names of all splits.
    seen_roles: from `chains.seen_roles`.
  """
  roles: list[str] = []
  parts = []
  for name, part in chosen.items():
    examples = _examples(config, facts, part)
    covered = np.full(len(part), -1)
    if name.startswith(("validation_id_", "test_id_")):
      groups, ids = chains.role_exposure(part, seen_roles)
      covered = len(roles) + ids
      roles += [f"{name}/{group}" for group in groups]
    examples["group/split"] = np.full(len(part), names.index(name), np.int32)
    examples["group/role_exposure"] = covered.astype(np.int32)
    parts.append(examples)
  table = {n: np.concatenate([p[n] for p in parts]) for n in parts[0]}
  return table, tuple(roles)


def _examples(
  config: Config, facts: chains.Graph, part: np.ndarray
) -> dict[str, np.ndarray]:
  """Tokens, targets, weights and bridges [N, T] of N chains of k hops."""
  tokens = language.questions(
    config.vocabulary, facts.heads[part[:, 0]], facts.relations[part]
  )
  shape = (len(part), config.sequence_length)
  last, hops = tokens.shape[1] - 1, part.shape[1]
  inputs = np.full(shape, config.vocabulary.padding, np.int32)
  inputs[:, : last + 1] = tokens
  bridges = np.full(shape, -1, np.int32)
  bridges[:, 1 : hops + 1] = facts.tails[part]
  targets = np.zeros(shape, np.int32)  # Not padding, whose logit may be -inf.
  targets[:, last] = bridges[:, hops]
  weights = np.zeros(shape, np.float32)
  weights[:, last] = 1.0
  return {
    "inputs": inputs,
    "targets": targets,
    "weights": weights,
    "bridges": bridges,
  }
