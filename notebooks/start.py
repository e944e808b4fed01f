"""Run first by every notebook: installs loopjax on Colab, prints the machine.

Packages are installed at the versions of `constraints.txt`. Colab has its own
JAX; if the session has already imported it, restarts the session.
"""

import importlib
import os
import pathlib
import shutil
import subprocess
import sys
from importlib import metadata

HERE = pathlib.Path(__file__).resolve().parent
# Packages that cannot be replaced once imported.
LOADED_ONCE = ("jax", "jaxlib", "flax", "numpy")


CUDA_13_DRIVER = 580  # The first NVIDIA driver that runs CUDA 13.


def extra() -> str:
  """The extra of this machine's accelerator, in brackets; "" for a CPU."""
  if shutil.which("nvidia-smi"):
    query = [
      "nvidia-smi",
      "--query-gpu=driver_version",
      "--format=csv,noheader",
    ]
    driver = subprocess.run(query, capture_output=True, text=True, check=True)
    major = int(driver.stdout.split(".")[0])
    return "[cuda]" if major >= CUDA_13_DRIVER else "[cuda12]"
  devices = (*pathlib.Path("/dev").glob("accel*"), pathlib.Path("/dev/vfio/0"))
  return "[tpu]" if any(path.exists() for path in devices) else ""


def run(command: list[str]) -> None:
  """Runs pip, and shows its progress on one changing line."""
  said: list[str] = []
  with subprocess.Popen(
    command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
  ) as process:
    for line in process.stdout or ():
      said.append(line)
      if line.startswith(("Collecting", "Installing")):
        print(f"\r{line.strip()[:70]:70}", end="", flush=True)
  print(f"\r{'':70}\r", end="", flush=True)
  if process.returncode:
    raise RuntimeError("".join(said[-20:]))


def install() -> None:
  """Installs the package of this folder's repository, unless installed."""
  try:
    metadata.version("loopjax")
    return
  except metadata.PackageNotFoundError:
    pass
  constraints = HERE / "constraints.txt"
  package = f"{HERE.parent}{extra()}"
  print(f"installing {package}, a minute or two", flush=True)
  pip = [sys.executable, "-m", "pip", "install", "--progress-bar=off"]
  run(pip + ["-c", str(constraints), "-e", package])
  importlib.invalidate_caches()
  sys.path.insert(0, str(HERE.parent))  # pip affects only later sessions.


def outdated() -> list[str]:
  """Imported packages whose version differs from the installed one."""
  return [
    name
    for name in LOADED_ONCE
    if name in sys.modules
    and sys.modules[name].__version__ != metadata.version(name)
  ]


def main() -> None:
  """Installs, restarts if needed, and prints versions and the accelerator."""
  if "google.colab" in sys.modules:
    install()
    if stale := outdated():
      from IPython import get_ipython

      print(f"restarting for another {stale[0]}; please run all cells again")
      get_ipython().kernel.do_shutdown(restart=True)
      return
  import jax

  import loopjax

  device = jax.devices()[0]
  where = "CPU" if device.platform == "cpu" else device.device_kind
  print(
    f"loopjax {loopjax.__version__}, JAX {jax.__version__},"
    f" {len(jax.devices())} x {where}, {os.cpu_count()} CPU cores"
  )


if __name__ == "__main__":
  main()
