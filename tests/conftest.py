"""Strict numerics and eight virtual devices.

The environment has to be set before JAX starts its backends.
"""

import os
import pathlib
import tempfile

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUM_CPU_DEVICES"] = "8"
os.environ.setdefault(
  "JAX_COMPILATION_CACHE_DIR",
  str(pathlib.Path(tempfile.gettempdir()) / "loopjax-test-compilation"),
)
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.3"

import jax

jax.config.update("jax_numpy_rank_promotion", "raise")
