"""Provenance of a result: devices, versions, revision, command."""

import pathlib
import shlex
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import Any

import jax

import loopjax

_PACKAGE = pathlib.Path(loopjax.__file__).parent


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
    "revision": revision_of(_PACKAGE),
    "command": command_of(sys.orig_argv),
  }


def command_of(words: Sequence[str]) -> str:
  """The command of a process, to be typed on any machine."""
  _, *words = words  # The interpreter.
  if words and pathlib.Path(words[0]).stem == "loopjax":  # Its script.
    return shlex.join(["loopjax", *words[1:]])
  return shlex.join(["python", *words])


def has_landed(revision: str, package: pathlib.Path = _PACKAGE) -> bool | None:
  """Whether a commit is HEAD or before it; None outside a checkout."""
  if not revision_of(package):
    return None
  words = ["git", "merge-base", "--is-ancestor", revision, "HEAD"]
  return not subprocess.run(words, cwd=package, capture_output=True).returncode


def revision_of(package: pathlib.Path) -> str:
  """Commit of the checkout that has the package at its root; "" outside one."""

  def git(*arguments: str) -> str:
    return subprocess.run(
      ["git", *arguments],
      cwd=package,
      capture_output=True,
      text=True,
      check=True,
    ).stdout.strip()

  try:
    # A package installed inside another project's checkout is not part of it.
    if pathlib.Path(git("rev-parse", "--show-toplevel")) != package.parent:
      return ""
    return git("describe", "--always", "--dirty", "--abbrev=12")
  except (OSError, subprocess.CalledProcessError):
    return ""
