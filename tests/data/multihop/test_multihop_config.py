"""Settings of the multi-hop task that cannot be."""

from loopjax.data.multihop import task


def test_as_many_chains_as_there_are():
  assert task.Config(num_train_chains=(46_000,)).max_hops == 2
  deepest = task.Config(num_train_chains=(1,) * 15, num_test_chains=(1,) * 15)
  dataset = task.make_dataset(deepest, "test", batch_size=8, seed=0)
  assert dataset.groups["split"][-1] == "test_ood_16"
