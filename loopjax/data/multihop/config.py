"""The settings of the multi-hop task."""

import dataclasses

import numpy as np

from loopjax import checks
from loopjax.data.multihop import chains, language, words
from loopjax.errors import UserError


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

  num_entities: int = 500
  num_relations: int = 50
  out_degree: int = 10
  num_train_chains: tuple[int, ...] = (10_000,)
  num_test_chains: tuple[int, ...] = (2_000,)
  num_fact_repeats: int = 1
  num_scored_train: int = 2_000
  format: str = "symbolic"
  vocab_multiple: int = 1
  graph_seed: int = 0
  split_seed: int = 0

  def __post_init__(self) -> None:
    checks.plain_values("task", self)
    checks.one_of("task", self, format=language.FORMATS)
    checks.at_least(
      "task",
      self,
      num_entities=1,
      num_relations=1,
      out_degree=1,
      num_fact_repeats=1,
      num_scored_train=0,
      vocab_multiple=1,
      graph_seed=0,
      split_seed=0,
    )
    if self.out_degree > self.num_relations:
      raise UserError(
        f"task.out_degree={self.out_degree} is greater than "
        f"task.num_relations={self.num_relations}: the relations of an entity "
        "must be distinct"
      )
    self._check_counts()
    if self.format != "symbolic":
      _check_words("num_relations", self.num_relations, 1, words.RELATIONS)
      _check_words("num_entities", self.num_entities, 2, words.NAMES)

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
      there = chains.num_chains(self.num_entities, self.out_degree, hops)
      requested = n_train + 2 * n_test
      if requested > there:
        raise UserError(
          f"task.num_train_chains={train} and task.num_test_chains={test} "
          f"(used for validation and for test) request {requested} chains of "
          f"{hops} hops, but a graph has {there}"
        )
      if there > np.iinfo(np.int64).max:
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
