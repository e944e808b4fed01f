"""Several processes: how they find each other, agree, and stop together."""

import itertools
import json
import os
import re
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from loopjax.errors import UserError

# A process silent for this long is considered dead, and all others stop.
_HEARTBEAT_SECONDS = 30
# How long a process that exits waits for the others to exit too.
_SHUTDOWN_SECONDS = 15
# How long a process waits for the others at a barrier.
_BARRIER_SECONDS = 3600

_BARRIERS = itertools.count()  # Counted identically by all processes.


class ProcessLostError(Exception):
  """Another process of the run is gone; restarting may help."""


class AgreedError(UserError):
  """A UserError that is raised on every process."""


# In errors of JAX's distributed runtime and of the libraries that exchange
# data. All others, such as those of a compiler, are the process's own.
_LOSS = re.compile(
  "UNAVAILABLE|DEADLINE_EXCEEDED|gloo|nccl|megascale|coordination|heartbeat"
  "|barrier|connection (closed|reset|refused)|broken pipe|socket",
  re.IGNORECASE,
)


def is_loss(error: Exception) -> bool:
  """Whether an error says that another process is gone."""
  if isinstance(error, jax.errors.JaxRuntimeError):
    return bool(_LOSS.search(str(error)))
  return isinstance(error, ProcessLostError)


def start(
  distributed: bool = False,
  coordinator_address: str | None = None,
  num_processes: int | None = None,
  process_id: int | None = None,
) -> None:
  """Joins the processes described by flags or environment, if any.

  Must run before JAX touches a device. `distributed` detects them from the
  machine.
  """
  address = coordinator_address or os.environ.get("JAX_COORDINATOR_ADDRESS")
  count = _number(num_processes, "JAX_NUM_PROCESSES")
  index = _number(process_id, "JAX_PROCESS_ID", "JOB_COMPLETION_INDEX")
  if address:
    if count is None or index is None or not 0 <= index < count:
      raise UserError(
        f"--coordinator_address={address} needs --num_processes and a smaller"
        f" --process_id; got {count} and {index}"
      )
    arguments: dict[str, Any] = {
      "coordinator_address": address,
      "num_processes": count,
      "process_id": index,
      "cluster_detection_method": "deactivate",
    }
  elif num_processes is not None or process_id is not None:
    raise UserError(
      "--num_processes and --process_id need --coordinator_address=HOST:PORT"
    )
  elif distributed or int(os.environ.get("SLURM_STEP_NUM_TASKS", 1)) > 1:
    arguments = {}
  else:
    return
  try:
    jax.distributed.initialize(
      **arguments,
      heartbeat_timeout_seconds=_HEARTBEAT_SECONDS,
      shutdown_timeout_seconds=_SHUTDOWN_SECONDS,
    )
  except ValueError as error:
    raise UserError(f"--distributed: {error}") from error
  except RuntimeError as error:
    raise ProcessLostError(
      f"the processes could not connect: {error}"
    ) from error


def _number(given: int | None, *variables: str) -> int | None:
  """What is given, or else the value of the first variable that is set."""
  if given is not None:
    return given
  for variable in variables:
    text = os.environ.get(variable)
    if text is not None:
      if not text.isdecimal():
        raise UserError(f"{variable}={text!r} is not a number")
      return int(text)
  return None


def from_process_0(function: Callable[[], Any]) -> Any:
  """The result, as JSON has it, of a function that process 0 alone calls.

  Its UserError is an AgreedError on every process.
  """
  if jax.process_count() == 1:
    return function()
  answer: dict[str, Any] = {}
  if jax.process_index() == 0:
    try:
      answer = {"value": function()}
    except UserError as error:
      answer = {"error": str(error)}
  text = np.frombuffer(json.dumps(answer).encode(), np.uint8)
  length = int(multihost_utils.broadcast_one_to_all(np.int32(len(text))))
  buffer = np.zeros(length, np.uint8)
  if jax.process_index() == 0:
    buffer[:] = text
  answer = json.loads(
    np.asarray(multihost_utils.broadcast_one_to_all(buffer)).tobytes()
  )
  if "error" in answer:
    raise AgreedError(answer["error"])
  return answer["value"]


def wait_for_all() -> None:
  """Returns when every process of the run has called it.

  This is a barrier of hosts, as the timeouts of device barriers are much
  shorter. If a process dies, JAX's service terminates those that wait for it.
  """
  count = jax.process_count()
  if count > 1:
    import orbax.checkpoint as ocp  # Takes long: not for one process.

    ocp.multihost.sync_global_processes(
      f"loopjax {next(_BARRIERS)}",
      timeout=_BARRIER_SECONDS,
      processes=set(range(count)),
    )


def gather_messages(message: str) -> str:
  """The non-empty messages of all processes, joined; "" if there are none."""
  if jax.process_count() == 1:
    return message
  size = 400
  encoded = message.encode()[:size]
  row = np.zeros(size, np.uint8)
  row[: len(encoded)] = np.frombuffer(encoded, np.uint8)
  rows = np.asarray(multihost_utils.process_allgather(row)).reshape(-1, size)
  texts = [bytes(r).rstrip(b"\0").decode(errors="replace") for r in rows]
  return "; ".join(
    f"process {index}: {text}" for index, text in enumerate(texts) if text
  )


def gather_array(x: Any) -> np.ndarray:
  """The full array, on every process, of one sharded over all of them."""
  if isinstance(x, jax.Array) and not x.is_fully_addressable:
    if x.is_fully_replicated:
      return np.asarray(x.addressable_data(0))
    return np.asarray(multihost_utils.process_allgather(x, tiled=True))
  return np.asarray(x)
