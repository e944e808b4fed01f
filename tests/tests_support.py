"""Configs for tests, and commands.

Imports loopjax lazily: tests of models start without training.
"""

import contextlib
import importlib.util
import json
import math
import pathlib
import re
from collections.abc import Iterable
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.interpreters import partial_eval

ROOT = pathlib.Path(__file__).parent.parent
CONFIGS = sorted(path.stem for path in (ROOT / "configs").glob("*_*.py"))
# Configs of papers; your own task needs no preset "paper".
OF_PAPERS = [
  name
  for name in CONFIGS
  if '"paper":' in (ROOT / "configs" / f"{name}.py").read_text()
]
# A config file and preset of seconds for every family.
SMOKE = {
  "adaptive": ("lm_adaptive", "smoke,model.ponder_weight=0.1"),
  "disco": ("multihop_disco", "smoke"), "hrm": ("sudoku_hrm", "smoke"),
  "loopformer": ("lm_loopformer", "smoke"),
  "looped": ("multihop_disco", "smoke,model.name=looped"),
  "melt": ("lm_melt", "smoke"),
  "plt": ("lm_looped", "smoke,plt,model.window=4"),
  "ponderlm": ("multihop_disco", "smoke,model.name=ponderlm"),
  "recurrent": ("lm_recurrent", "smoke"), "sleep": ("automaton_sleep", "smoke"),
  "transformer": ("multihop_disco", "smoke,model.name=transformer"),
  "trm": ("sudoku_trm", "smoke"), "urm": ("sudoku_urm", "smoke"),
  "utm": ("sudoku_utm", "smoke"),
}  # fmt: skip
# Families by compilation time of a step, the shortest first.
SIZES = (
  "looped", "transformer", "plt", "ponderlm", "disco", "loopformer", "urm",
  "utm", "trm", "hrm", "recurrent", "melt", "adaptive", "sleep",
)  # fmt: skip


def by_size(families: Iterable[str]) -> list[str]:
  """Names of families, the smallest first; new ones are last."""
  known = [name for name in SIZES if name in families]
  return known + sorted(set(families) - set(known))


def causal() -> list[str]:
  """Names of families that predict next tokens, the smallest first."""
  from loopjax.models import MODELS

  return by_size([name for name in MODELS if MODELS[name].reading])


def crossing(
  names: str | tuple[str, ...], cases: Iterable, *, manual=(), **options
):
  """Parametrizes a test whose first case is representative; others are long.

  Cases in `manual` are run by hand: they take long, and others are similar.
  """
  first, *others = cases
  assert all(case in others for case in manual), manual
  rest = []
  for case in others:
    values = (case,) if isinstance(names, str) else case
    mark = pytest.mark.manual if case in manual else pytest.mark.long
    rest.append(pytest.param(*values, marks=mark))
  return pytest.mark.parametrize(names, [first, *rest], **options)


def long_case(*values):
  """A case of a parametrized test that only `.ci/run` runs."""
  return pytest.param(*values, marks=pytest.mark.long)


def script(path: pathlib.Path):
  """The module of a Python file that belongs to no package."""
  spec = importlib.util.spec_from_file_location(path.stem, path)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


def load_config(name: str, arg: str):
  """The config of `--config=configs/NAME.py:ARG`."""
  return namespace(name)["get_config"](arg)


def namespace(name: str) -> dict:
  """The definitions of configs/NAME.py."""
  from loopjax.config import presets

  return presets.read(ROOT / "configs" / f"{name}.py")


def untrained(workdir, config):
  """A run that has saved its first state; returns its work directory."""
  from loopjax import config as config_lib
  from loopjax import program as program_lib
  from loopjax.run import workdir as workdir_lib
  from loopjax.run.checkpoints import checkpoint as checkpoint_lib

  settings = config_lib.resolve(config)
  workdir.mkdir(parents=True)
  workdir_lib.write_json(workdir / "config.json", settings.plain)
  program = program_lib.make_program(settings, jax.devices()[:1])
  checkpoints = checkpoint_lib.Checkpoints(workdir)
  checkpoints.save(0, program.init(jax.random.key(settings.run.seed)), {})
  checkpoints.close()
  return workdir


def summary_of(workdir) -> dict:
  """The summary of a run."""
  return json.loads((workdir / "summary.json").read_text())


def make_datasets(settings):
  """Both splits as one process reads them."""
  from loopjax import sharding, train

  mesh = sharding.make_mesh(sharding.Config(), jax.devices()[:1])
  return train.make_datasets(settings, mesh)


def train_batches(settings, number):
  """The first batches of training, as one process reads them."""
  from loopjax.data import pipeline

  dataset = make_datasets(settings)["train"]
  batches = pipeline.iterate(dataset.batches, num_threads=0)
  return [next(batches) for _ in range(number)]


def stacked(program, batches):
  """The batches of one call of `program.train`."""
  from loopjax import sharding

  tree = jax.tree.map(lambda *rows: np.stack(rows), *batches)
  size = len(batches[0]["weights"])
  return sharding.put_batch(program.mesh, tree, size, stacked=True)


def smoke(**overrides):
  """The Sudoku smoke config; section__key=value overrides."""
  from loopjax import config as config_lib

  config = load_config("sudoku_utm", "smoke")
  config_lib.override(
    config, {key.replace("__", "."): v for key, v in overrides.items()}
  )
  return config


@contextlib.contextmanager
def refused(message: str):
  """The block must end in a one-line `UserError` with the message."""
  from loopjax.errors import UserError

  with pytest.raises(UserError, match=message) as caught:
    yield
  assert "\n" not in str(caught.value)


def rows_of_metrics(workdir) -> list[dict]:
  """Metrics without timings, which differ between runs."""
  from loopjax.run import workdir as workdir_lib

  timing = (
    "steps_per_second", "examples_per_second", "data_wait_fraction",
    "model_flops_per_second",
  )  # fmt: skip
  return [
    {name: value for name, value in row.items() if name not in timing}
    for row in workdir_lib.read_metrics(workdir)
  ]


def by_path(tree) -> dict:
  """Leaves by path, such as "layers/mlp/kernel"."""
  return {
    jax.tree_util.keystr(path, simple=True, separator="/"): leaf
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
  }


def traced_sizes(function, *arguments) -> list[int]:
  """Like `array_sizes`, of a program that is not compiled.

  Without what its results do not need, which XLA would remove.
  """
  traced = jax.make_jaxpr(function)(*arguments)
  needed = [True] * len(traced.out_avals)
  return array_sizes(str(partial_eval.dce_jaxpr(traced.jaxpr, needed)[0]))


def array_sizes(text: str) -> list[int]:
  """Number of elements of every array in the text of a compiled program."""
  shapes = re.findall(r"\b(?:f|bf|s|u|pred)\d*\[([\d,]+)\]", text)
  return [math.prod(int(size) for size in x.split(",")) for x in shapes]


def assert_rounded(actual, expected, roundings, dtype=jnp.bfloat16):
  """Arrays differ by at most some successive roundings to a dtype, in the norm.

  Each changes a number by at most epsilon / 2 times itself, and an array by at
  most this fraction of its norm. Errors of many numbers partly cancel: `n`
  roundings use about 0.4 / sqrt(n) of the bound.
  """
  tolerance = roundings * float(jnp.finfo(dtype).eps) / 2
  for got, want in zip(
    jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True
  ):
    got, want = (np.asarray(x, np.float64) for x in (got, want))
    assert got.shape == want.shape
    error, norm = np.linalg.norm(got - want), np.linalg.norm(want)
    np.testing.assert_allclose(error, 0, atol=tolerance * norm)


def assert_close(actual, expected, tolerance, least=0.0):
  """Every array within tolerance times its largest element, or `least`."""
  for got, want in zip(
    jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True
  ):
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    got, want = (np.asarray(x, np.float64) for x in (got, want))
    np.testing.assert_allclose(
      got, want, rtol=0, atol=tolerance * max(np.abs(want).max(), least)
    )


@contextlib.contextmanager
def strict_dtypes():
  """Numbers of different dtypes must be cast explicitly.

  For models, losses and scores; Optax multiplies floats by counts. Code that
  calls `jnp.promote_types`, such as JAX's attention, mixes dtypes on purpose.
  """
  loose = jax.numpy_dtype_promotion("standard")
  with contextlib.ExitStack() as stack:
    for module, name in (
      (jnp, "promote_types"),
      (jax.nn, "dot_product_attention"),
    ):
      function = loose(getattr(module, name))
      stack.enter_context(mock.patch.object(module, name, function))
    stack.enter_context(jax.numpy_dtype_promotion("strict"))
    yield


def command(entry, *arguments: str, directory=ROOT) -> int:
  """Runs a command in this process; returns its exit status."""
  least = jax.config.jax_persistent_cache_min_compile_time_secs
  with contextlib.chdir(directory):
    status = entry([*arguments])
  jax.config.update("jax_persistent_cache_min_compile_time_secs", least)
  return status
