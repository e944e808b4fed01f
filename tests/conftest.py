"""Strict numerics and eight virtual devices.

The environment has to be set before JAX starts its backends.
"""

import os
import pathlib
import signal
import tempfile

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUM_CPU_DEVICES"] = "8"
# XLA's pool for what is inside an operation can hang on a machine of few cores
# (seen with jaxlib 0.10 on eight devices; others report it of one): without it
# a device runs its program in one thread. One program at a time, for a device
# that waits at a collective holds a thread.
os.environ["NPROC"] = "32"
os.environ["JAX_CPU_ENABLE_ASYNC_DISPATCH"] = "false"
os.environ["XLA_FLAGS"] = " ".join(
  (
    os.environ.get("XLA_FLAGS", ""),
    "--xla_cpu_multi_thread_eigen=false",
    # Eight devices on two busy cores may still wait for each other for long;
    # XLA would end the process after 40 s.
    "--xla_cpu_collective_call_terminate_timeout_seconds=300",
    # Programs run for milliseconds: what optimises them takes longer.
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
  )
)
os.environ.setdefault(
  "JAX_COMPILATION_CACHE_DIR",
  str(pathlib.Path(tempfile.gettempdir()) / "loopjax-test-compilation"),
)
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.3"

import jax
import pytest

jax.config.update("jax_numpy_rank_promotion", "raise")

# A shell that runs the tests in the background has these ignored, and what is
# started here would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(autouse=True, scope="module")
def _let_go():
  """What a module has compiled would stay in memory to the end."""
  yield
  jax.clear_caches()
