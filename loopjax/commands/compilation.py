"""Keeps what is compiled for the next command."""

import os

import jax

from loopjax.run import user_cache


def keep() -> None:
  """Turns on JAX's compilation cache, in a directory that is per user."""
  default = str(user_cache.directory("compilation"))
  directory = os.environ.get("JAX_COMPILATION_CACHE_DIR", default)
  jax.config.update("jax_compilation_cache_dir", directory)
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
