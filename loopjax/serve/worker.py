"""The engine's thread, and its interface to the event loop.

Only this thread uses the engine. It receives commands through a queue. After
each step of the engine it passes the new tokens of all requests to the event
loop with one callback.
"""

import asyncio
import collections
import functools
import queue
import threading
import traceback
from collections.abc import AsyncGenerator, Callable, Collection, Sequence

from loopjax.errors import UserError
from loopjax.generate.engine import Engine
from loopjax.generate.requests import GeneratedToken, GenerationRequest
from loopjax.serve.errors import EngineFailedError, QueueFullError

# New tokens of a job, each with the index of its request in the job.
NewTokens = list[tuple[int, GeneratedToken]]


class Job:
  """The engine's requests for one request of a client.

  Attributes:
    requests: the requests, one per choice.
    unread: indices of the requests whose last token has not been read.
    accepted: a future that is done when the engine has accepted or refused all
      requests.
  """

  def __init__(self, requests: Sequence[GenerationRequest]):
    self.requests = tuple(requests)
    self.unread = set(range(len(self.requests)))
    self.accepted = asyncio.get_running_loop().create_future()
    self._arrived: asyncio.Queue[NewTokens | Exception] = asyncio.Queue()

  def put(self, arrived: NewTokens | Exception) -> None:
    """Adds new tokens or an error; called in the event loop."""
    self._arrived.put_nowait(arrived)

  async def tokens(self) -> AsyncGenerator[NewTokens, None]:
    """Yields new tokens of the requests, several at a time, until all end.

    Raises:
      EngineFailedError: the engine has failed.
    """
    while self.unread:
      arrived = await self._arrived.get()
      if isinstance(arrived, Exception):
        raise arrived
      tokens = [(n, token) for n, token in arrived if n in self.unread]
      self.unread -= {n for n, token in tokens if token.finish}
      yield tokens


class Worker:
  """Runs an engine in its own thread; used from one event loop.

  Attributes:
    capacity: maximum number of running and waiting requests.
    failed: whether the engine has failed.
  """

  def __init__(
    self,
    engine: Engine,
    capacity: int,
    on_failure: Callable[[], None],
  ):
    """Creates the worker; `start` starts its thread.

    Args:
      engine: the engine, which only the worker may use from now on.
      capacity: maximum number of running and waiting requests.
      on_failure: called in the event loop if the engine fails.
    """
    self.capacity = capacity
    self._engine, self._on_failure = engine, on_failure
    self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
    self._thread = threading.Thread(
      target=self._run, name="engine", daemon=True
    )
    self.failed = False
    # Used by the event loop: the unfinished requests of each job.
    self._running: dict[Job, set[int]] = {}
    # Used by the thread: engine request number -> (job, index in the job).
    self._owners: dict[int, tuple[Job, int]] = {}
    self._stopping = False

  def start(self) -> None:
    """Starts the thread; must be called in the event loop that uses it."""
    self._loop = asyncio.get_running_loop()
    self._thread.start()

  async def stop(self) -> None:
    """Stops the thread after its current step; drops running requests."""
    self._commands.put(self._end)
    await asyncio.to_thread(self._thread.join)

  @property
  def healthy(self) -> bool:
    """Whether the thread is alive and the engine has not failed."""
    return self._thread.is_alive() and not self.failed

  @property
  def num_live(self) -> int:
    """Number of running and waiting requests."""
    return sum(map(len, self._running.values()))

  async def submit(self, requests: Sequence[GenerationRequest]) -> Job:
    """Passes requests to the engine, all of them or none.

    Raises:
      QueueFullError: they would exceed the capacity.
      EngineFailedError: the engine has failed.
      UserError: the engine refuses one of them.
    """
    if not self.healthy:
      raise EngineFailedError
    if self.num_live + len(requests) > self.capacity:
      raise QueueFullError
    job = Job(requests)
    if not requests:  # Only prompts are scored: nothing to ask the engine.
      return job
    self._running[job] = set(job.unread)
    self._commands.put(functools.partial(self._add, job))
    try:
      await job.accepted
    except BaseException:
      self.cancel(job)
      raise
    return job

  def cancel(self, job: Job, numbers: Collection[int] | None = None) -> None:
    """Cancels requests of a job.

    Their slots are free after the current step of the engine.

    Args:
      job: from `submit`.
      numbers: indices of the requests, or None for all; those of requests that
        have ended are ignored.
    """
    numbers = job.unread if numbers is None else numbers
    cancelled = self._running.get(job, set()).intersection(numbers)
    job.unread -= set(numbers)
    if cancelled:
      self._remove(job, cancelled)
      self._commands.put(functools.partial(self._cancel, job, cancelled))

  # The following methods are called in the event loop.

  def _remove(self, job: Job, ended: set[int]) -> None:
    """Removes requests from the running and waiting ones."""
    remaining = self._running.get(job, set()) - ended
    if remaining:
      self._running[job] = remaining
    else:
      self._running.pop(job, None)

  def _resolve(self, job: Job, refusal: UserError | None) -> None:
    """Tells `submit` whether the engine has accepted the job."""
    if job.accepted.done():  # Its client has disconnected.
      return
    if refusal:
      job.accepted.set_exception(refusal)
    else:
      job.accepted.set_result(None)

  def _deliver(self, new_tokens: dict[Job, NewTokens]) -> None:
    """Passes new tokens to their jobs."""
    for job, tokens in new_tokens.items():
      self._remove(job, {n for n, token in tokens if token.finish})
      job.put(tokens)

  def _fail(self) -> None:
    """Ends all jobs with an error."""
    self.failed = True
    for job in list(self._running):
      job.put(EngineFailedError())
      if not job.accepted.done():
        job.accepted.set_exception(EngineFailedError())
    self._running.clear()
    self._on_failure()

  # The following methods are called in the thread.

  def _run(self) -> None:
    """The thread's main loop."""
    try:
      while not self._stopping:
        self._run_commands()
        if not self._stopping and not self._engine.idle:
          self._step()
    except Exception:  # Any error of the device or the program.
      traceback.print_exc()
      self._loop.call_soon_threadsafe(self._fail)

  def _run_commands(self) -> None:
    """Runs queued commands; waits for one if the engine is idle."""
    if self._engine.idle:
      self._commands.get()()
    while not self._stopping:
      try:
        command = self._commands.get_nowait()
      except queue.Empty:
        return
      command()

  def _step(self) -> None:
    """Runs a step of the engine and passes the new tokens on."""
    new_tokens: dict[Job, NewTokens] = collections.defaultdict(list)
    for token in self._engine.step():
      job, number = self._owners[token.request_id]
      new_tokens[job].append((number, token))
      if token.finish:
        del self._owners[token.request_id]
    if new_tokens:
      self._loop.call_soon_threadsafe(self._deliver, dict(new_tokens))

  def _add(self, job: Job) -> None:
    """Adds the requests of a job to the engine, all of them or none."""
    added: list[int] = []
    refusal = None
    try:
      for request in job.requests:
        added.append(self._engine.add(request))
    except UserError as error:
      refusal = error
    if refusal:
      for number in added:
        self._engine.cancel(number)
    else:
      self._owners |= {x: (job, n) for n, x in enumerate(added)}
    self._loop.call_soon_threadsafe(self._resolve, job, refusal)

  def _cancel(self, job: Job, numbers: set[int]) -> None:
    """Cancels requests of a job in the engine."""
    for x, (owner, number) in list(self._owners.items()):
      if owner is job and number in numbers:
        self._engine.cancel(x)
        del self._owners[x]

  def _end(self) -> None:
    self._stopping = True
