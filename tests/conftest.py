"""Strict numerics and eight virtual devices.

The environment must be set before JAX initialises its backends.
"""

import ctypes
import faulthandler
import gc
import importlib.metadata
import os
import pathlib
import signal
import tempfile
from unittest import mock

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUM_CPU_DEVICES"] = "8"
# XLA's intra-operation thread pool can hang on machines with few cores (seen
# with jaxlib 0.10 on eight devices; reported elsewhere for one). Without it a
# device runs its program in one thread. One program at a time, because a device
# that waits at a collective holds a thread.
os.environ["NPROC"] = "32"
os.environ["JAX_CPU_ENABLE_ASYNC_DISPATCH"] = "false"
os.environ["XLA_FLAGS"] = " ".join(
  (
    os.environ.get("XLA_FLAGS", ""),
    "--xla_cpu_multi_thread_eigen=false",
    # Eight devices on two busy cores may still wait long for each other; XLA
    # would end the process after 40 s.
    "--xla_cpu_collective_call_terminate_timeout_seconds=300",
    # Programs run for milliseconds; optimising them takes longer.
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
  )
)
if importlib.metadata.version("jaxlib").startswith("0.10."):
  # Fusions through MLIR take four times as long to compile. Later versions
  # abort on unknown flags.
  os.environ["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false"
os.environ.setdefault(
  "JAX_COMPILATION_CACHE_DIR",
  str(pathlib.Path(tempfile.gettempdir()) / "loopjax-test-compilation"),
)
# Caches every program: most have one operation and are used repeatedly.
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"

import jax
import margins
import pytest

from loopjax import errors

jax.config.update("jax_numpy_rank_promotion", "raise")
# Tracing creates many long-lived objects: collecting garbage after every 700
# takes up to a tenth of a test's time.
gc.set_threshold(100_000, 20, 20)

# Shells ignore these signals in background jobs, and child processes would
# inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Time limit of manual tests, in seconds.
MANUAL = 600
# Memory of a process above which it forgets its compiled programs.
MOST_BYTES = 2 * 2**30
_STDERR = pytest.StashKey[int]()


def pytest_addoption(parser):
  parser.addoption(
    "--margin",
    type=float,
    help="largest share of its tolerance that a comparison may use",
  )


def pytest_configure(config):
  config.stash[_STDERR] = os.dup(2)  # Before pytest captures it.


def pytest_collection_modifyitems(items):
  for item in items:
    if item.get_closest_marker("manual"):
      item.add_marker(pytest.mark.timeout(MANUAL))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
  limit = item.config.getoption("margin")
  if limit is None:
    return (yield)
  with margins.within(limit):
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_timeout_set_timer(item, settings):
  """Ends a process whose main thread hangs outside Python.

  The timeout's signal does not reach it there. pytest-xdist then names the
  test.
  """
  faulthandler.dump_traceback_later(
    settings.timeout + 30, exit=True, file=item.config.stash[_STDERR]
  )
  return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_timeout_cancel_timer():
  faulthandler.cancel_dump_traceback_later()
  return (yield)


@pytest.fixture
def user_cache(tmp_path, monkeypatch):
  """A cache directory apart from the user's."""
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
  return tmp_path / "cache" / "loopjax"


@pytest.fixture
def refusal(capsys):
  """Runs a command that must end with one line and exit status 2."""

  def run(entry, *arguments, said=False):
    assert entry(*arguments) == 2
    out, error = capsys.readouterr()
    error = "".join(x for x in error.splitlines(True) if " keeps of " not in x)
    assert error.startswith("error: ") and error.count("\n") == 1
    assert said or not out
    return error

  return run


@pytest.fixture(scope="session")
def sketches():
  """Draws figures small and without layout, in a tenth of the time."""
  from loopjax.analysis.plots import draw  # Not needed by most test files.

  save = draw.save

  def sketch(figure, path):
    figure.set_layout_engine("none")
    figure.set_size_inches(2, 2)
    return save(figure, path)

  with mock.patch.object(draw, "save", sketch):
    yield


@pytest.fixture(scope="module")
def programs():
  """Whole runs of equal settings share what is traced and compiled.

  Of one module, whose compiled programs are forgotten at its end.
  """
  from loopjax import program  # Not needed by most test files.
  from loopjax.train import evaluate

  make, step, made, steps = program.make_program, evaluate._step, {}, {}

  def make_once(settings, devices=None, teacher=None):
    parts = [settings, teacher] if teacher else [settings]
    key = str((parts, [x.family.loss for x in parts], devices))
    if key not in made:
      made[key] = make(settings, devices, teacher)
    return made[key]

  def step_once(one):
    # Kept with its program, so that no other has its id.
    if id(one) not in steps:
      steps[id(one)] = one, step(one)
    return steps[id(one)][1]

  with (
    mock.patch.object(program, "make_program", make_once),
    mock.patch.object(evaluate, "_step", step_once),
  ):
    yield


def _resident_bytes():
  """Memory of this process; infinite where Linux does not say it."""
  try:
    pages = int(
      pathlib.Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]
    )
  except OSError:
    return float("inf")
  return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture(autouse=True)
def _nothing_said():
  """Notes are said once in a process."""
  errors.note.cache_clear()


@pytest.fixture(autouse=True, scope="module")
def _let_go():
  """Compiled programs of all modules would fill the memory.

  What they share is traced once, until there is too much.
  """
  yield
  if _resident_bytes() > MOST_BYTES:
    jax.clear_caches()
    gc.collect()
    # The C library of Linux keeps most of what is freed. The process would
    # remain above the limit and forget after each of the remaining modules.
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
      trim(0)
