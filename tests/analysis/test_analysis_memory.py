"""Cache sizes by hand, and MELT's table 2."""

import re

import pytest
from tests_support import load_config

from loopjax import config as config_lib
from loopjax.analysis import memory
from loopjax.errors import UserError
from loopjax.models import MODELS


@pytest.mark.long
def test_table_2_of_melt():
  """Its first column and the model memory of both looped models, exactly."""
  lines = memory.table_2().splitlines()
  rows = {line.split()[0]: line.split()[1:] for line in lines[1:4]}
  assert rows["MELT-1.6B"] == ["0.196608", "3.272", "6.29", "6.44", "9.71"]
  assert rows["Ouro-1.4B"] == ["0.786432", "2.869", "25.17", "25.77", "28.64"]
  assert rows["Qwen3-1.7B"] == ["0.114688", "3.441", "3.67", "3.76", "7.20"]


def test_ouro_has_its_published_number_of_parameters():
  sizes = {size.kind: size for size in memory.sizes(memory.ouro())}
  assert set(sizes) == set(MODELS["looped"].reading.caches)
  for size in sizes.values():
    assert size.parameters == 2 * 1_434_652_673
    loops = 4 if size.kind == "per_loop" else 1
    assert size.by_token == loops * 24 * 2 * 2048 * 2


@pytest.mark.parametrize(
  "name", ["multihop_disco", "automaton_sleep", "lm_adaptive"]
)
def test_a_table_has_every_kind_of_the_family(name):
  settings = config_lib.resolve(load_config(name, "smoke"))
  text = memory.of_config(settings, 100)
  reading = MODELS[settings.model_name].reading
  rows = re.findall(r"^(\w+) +([\d,]+) +([\d,]+)", text, re.MULTILINE)
  assert tuple(kind for kind, *_ in rows) == reading.caches
  if name == "automaton_sleep":
    assert rows[0][1] == "0"


def test_what_predicts_no_next_tokens_has_no_cache():
  settings = config_lib.resolve(load_config("sudoku_utm", "smoke"))
  with pytest.raises(UserError, match="does not predict next tokens"):
    memory.sizes(settings)


def test_the_numbers_of_a_table_are_the_sizes():
  settings = config_lib.resolve(load_config("multihop_disco", "smoke"))
  sizes = memory.sizes(settings)
  assert len(sizes) > 1
  lines = memory.of_config(settings, 700).splitlines()[2:]
  first = sizes[0].by_row + 700 * sizes[0].by_token
  for size, line in zip(sizes, lines, strict=True):
    size_bytes = size.by_row + 700 * size.by_token
    assert line.split() == [
      size.kind, f"{size.by_token:,}", f"{size.by_row:,}",
      f"{size_bytes / 1e6:,.3f}", f"{size_bytes / first:.3f}",
    ]  # fmt: skip
