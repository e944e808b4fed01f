"""Strict numerics and eight virtual devices.

The environment has to be set before JAX starts its backends.
"""

import os
import pathlib
import signal
import tempfile

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUM_CPU_DEVICES"] = "8"
# Eight devices on two busy cores may wait for each other for long; XLA would
# end the process after 40 s.
os.environ["XLA_FLAGS"] = " ".join(
  (
    os.environ.get("XLA_FLAGS", ""),
    "--xla_cpu_collective_call_terminate_timeout_seconds=600",
  )
)
os.environ.setdefault(
  "JAX_COMPILATION_CACHE_DIR",
  str(pathlib.Path(tempfile.gettempdir()) / "loopjax-test-compilation"),
)
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.3"

import jax

jax.config.update("jax_numpy_rank_promotion", "raise")

# A shell that runs the tests in the background has these ignored, and what is
# started here would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
