"""One training call of several runs, in one compiled program."""

from typing import Any

import jax
import jax.numpy as jnp

from loopjax import config as config_lib
from loopjax import sharding
from loopjax.errors import UserError
from loopjax.program import build


def together(program: build.Program) -> Any:
  """`program.train` of several runs: takes and returns lists of their arrays.

  The function (states, stacked batches, the teachers' parameters) -> (states,
  metrics of every step) vectorises the runs. It stacks their arrays for the
  call only: outside, each run has its own state. It donates the states,
  except with run.debug_nans.
  """

  def train(states: Any, batches: Any, teachers: Any) -> Any:
    stacked = jax.tree.map(
      lambda *runs: jnp.stack(runs),
      *zip(states, batches, teachers, strict=True),
    )
    results = jax.vmap(program.uncompiled)(*stacked)
    by_run = [
      jax.tree.map(lambda runs, i=i: runs[i], results)
      for i in range(len(states))
    ]
    states, metrics = zip(*by_run, strict=True)
    shardings = jax.tree.map(lambda x: x.sharding, program.abstract_state)
    replicated = sharding.replicated(program.mesh)
    return jax.lax.with_sharding_constraint(
      (list(states), list(metrics)),
      (
        [shardings] * len(states),
        jax.tree.map(lambda _: replicated, list(metrics)),
      ),
    )

  platform = program.mesh.devices.flat[0].platform
  return jax.jit(
    train,
    donate_argnums=() if program.settings.run.debug_nans else 0,
    compiler_options=build.COMPILER_OPTIONS.get(platform),
  )


def check(settings: config_lib.Settings) -> None:
  """Raises UserError if several runs of this kind cannot share a program."""
  if jax.process_count() > 1:
    raise UserError("--seeds needs a single process")
  required = {"mesh.fsdp": 1, "mesh.tensor": 1, "loop.kernels": "xla"}
  single = {"run.profile_steps": "", "run.wandb_project": ""}
  for name, value in (required | single).items():
    section, key = name.split(".")
    if getattr(getattr(settings, section), key) != value:
      raise UserError(f"--seeds needs {name}={value!r}")
