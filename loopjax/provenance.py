"""What a result depends on: devices, versions, revision, command."""

import pathlib
import subprocess
import sys
from importlib import metadata
from typing import Any

import jax

import loopjax


def environment() -> dict[str, Any]:
  """{"devices", "versions", "revision", "command"} of this process."""
  packages = ("jax", "flax", "optax", "orbax-checkpoint", "grain", "numpy")
  return {
    "devices": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
    "versions": {
      "python": sys.version.split()[0],
      "loopjax": loopjax.__version__,
      **{name: metadata.version(name) for name in packages},
    },
    "revision": _revision(),
    "command": " ".join(["python", *sys.orig_argv[1:]]),
  }


def _revision() -> str:
  """Commit of the checkout that runs, or "" outside of one."""
  command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
  here = pathlib.Path(__file__).parent
  try:
    done = subprocess.run(
      command, cwd=here, capture_output=True, text=True, check=True
    )
  except (OSError, subprocess.CalledProcessError):
    return ""
  return done.stdout.strip()
