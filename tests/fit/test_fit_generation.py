"""How many texts fit on a machine."""

import types

import pytest
from tests_support import load_config, smoke

from loopjax import config as config_lib
from loopjax import program as program_lib
from loopjax import sharding
from loopjax.errors import UserError
from loopjax.fit import generation, topology
from loopjax.kernels.gated_delta import chunked
from loopjax.program import tree_size

LENGTH = 64


def machine(kib):
  """A CPU with this much memory, whose programs compile quickly."""
  of_cpu = topology.machine(topology.parse("cpu:1"), kib / 2**20)
  return of_cpu._replace(compiler_options={"xla_backend_optimization_level": 0})


@pytest.fixture(
  scope="module",
  params=["lm_looped", pytest.param("lm_recurrent", marks=pytest.mark.manual)],
)
def settings(request):
  return config_lib.resolve(load_config(request.param, "smoke"))


@pytest.mark.long
def test_as_many_texts_as_fit(settings):
  model = generation.model_of(settings, machine(1), "float32")
  one = generation.measured(model, machine(2**20), 1, LENGTH)
  assert one.num_texts == 1
  by_token, by_row = program_lib.cache_bytes(settings)
  assert one.cache == LENGTH * by_token + by_row
  held = tree_size.num_bytes(model.params) + one.cache
  assert one.decode.memory["arguments"] >= held
  small = machine(one.needed / 1024 - 1)
  assert generation.most(model, small, LENGTH).num_texts == 0
  large = machine((one.needed + 9 * one.cache) / 1024)
  found = generation.most(model, large, LENGTH)
  assert 2 < found.num_texts <= 10
  assert found.needed <= large.memory
  assert found.cache == found.num_texts * one.cache
  row = generation.table([found]).splitlines()[1].split()
  assert row[:2] == [str(LENGTH), str(found.num_texts)]


def test_half_the_bytes_in_bfloat16(settings):
  sizes = [
    tree_size.num_bytes(generation.model_of(settings, machine(1), dtype).params)
    for dtype in ("float32", "bfloat16")
  ]
  assert sizes[0] == 2 * sizes[1]


class Called(Exception):
  """Carries the arguments of a call."""


def test_prompts_are_read_in_whole_chunks_of_melt(monkeypatch):
  def prompt_chunks(sequences, num_rows, length, **options):
    raise Called(length)

  monkeypatch.setattr(generation.batches, "prompt_chunks", prompt_chunks)
  melt = config_lib.resolve(
    load_config("lm_melt", "smoke,model.prefill_chunk=48")
  )
  model = generation.model_of(melt, machine(1), "float32")
  # At least 256 tokens, if texts are that long.
  for max_tokens, length in ((512, 6 * 48), (100, 100)):
    with pytest.raises(Called) as called:
      generation.measured(model, machine(1), 1, max_tokens)
    assert called.value.args == (length,)


def test_prompts_of_sleep_are_read_in_the_chunks_of_the_machine(monkeypatch):
  """The programs are traced on a CPU, which has smaller ones."""

  def default_size():
    raise Called(sharding.platform())

  monkeypatch.setattr(chunked, "default_size", default_size)
  sleep = config_lib.resolve(load_config("lm_sleep", "smoke"))
  model = generation.model_of(sleep, machine(1), "float32")
  chip = types.SimpleNamespace(platform="tpu", device_kind="TPU v5 lite")
  with pytest.raises(Called) as called:
    generation.measured(model, machine(1)._replace(devices=[chip]), 1, LENGTH)
  assert called.value.args == ("tpu",)


def test_families_without_next_tokens_are_refused():
  with pytest.raises(UserError, match="does not predict next tokens"):
    generation.model_of(config_lib.resolve(smoke()), machine(1), "float32")
