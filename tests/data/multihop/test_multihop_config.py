"""Settings of the multi-hop task that cannot be."""

import pytest

from loopjax.data.multihop import task
from loopjax.errors import UserError


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"num_entities": 0}, r"num_entities=0 must be at least 1"),
    ({"out_degree": 51}, "out_degree=51 is more than task.num_relations=50"),
    ({"num_train_chains": [10]}, r"num_train_chains=\[10\] must be of type"),
    ({"num_train_chains": (1.5,)}, r"num_train_chains=\(1.5,\) must be counts"),
    ({"num_test_chains": (-1,)}, r"num_test_chains=\(-1,\) must be counts"),
    ({"num_train_chains": ()}, "one count each for 2, 3"),
    ({"num_test_chains": (10, 10)}, "one count each for 2, 3"),
    (
      {"num_train_chains": (49_000,)},
      "ask for 53000 chains of 2 hops; a graph has 50000",
    ),
    (
      {"num_train_chains": (1,) * 16, "num_test_chains": (1,) * 16},
      r"500 \* 10\*\*17 chains of 17 hops cannot be numbered in 63 bits",
    ),
    ({"format": "sideways"}, "format='sideways' is not one of symbolic"),
    (
      {"format": "direct", "num_entities": 5000},
      "num_entities=5000 in English can be 1200 at most",
    ),
    (
      {"format": "reverse", "num_relations": 51},
      "num_relations=51 in English can be 50 at most",
    ),
    ({"vocab_multiple": 0}, "vocab_multiple=0"),
    ({"graph_seed": -1}, "graph_seed=-1"),
    ({"split_seed": -1}, "split_seed=-1"),
  ],
)
def test_impossible_settings_are_named(changes, message):
  with pytest.raises(UserError, match=message) as error:
    task.Config(**changes)
  assert "\n" not in str(error.value)


def test_as_many_chains_as_there_are():
  assert task.Config(num_train_chains=(46_000,)).max_hops == 2
  deepest = task.Config(num_train_chains=(1,) * 15, num_test_chains=(1,) * 15)
  dataset = task.make_dataset(deepest, "test", batch_size=8, seed=0)
  assert dataset.groups["split"][-1] == "test_ood_16"
