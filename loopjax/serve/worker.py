"""The engine's thread, and the interface to it from the event loop.

Only this thread touches the engine. Commands reach it through a queue, and
after each step it wakes the event loop once, with the new tokens of all
requests.
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

# New tokens of a job, each with the index of its request in the job.
News = list[tuple[int, GeneratedToken]]


class FullError(Exception):
  """The maximum number of requests is already running or waiting."""


class BrokenError(Exception):
  """The engine has failed and accepts no more requests."""


class Job:
  """Requests of one client that are answered together.

  Attributes:
    requests: the requests.
    unread: indices of the requests whose last token has not been read.
    accepted: a future; done once the engine has accepted or refused them all.
  """

  def __init__(self, requests: Sequence[GenerationRequest]):
    self.requests = tuple(requests)
    self.unread = set(range(len(self.requests)))
    self.accepted = asyncio.get_running_loop().create_future()
    self._arrived: asyncio.Queue[News | Exception] = asyncio.Queue()

  def put(self, news: News | Exception) -> None:
    """Adds new tokens or an error; called in the event loop."""
    self._arrived.put_nowait(news)

  async def tokens(self) -> AsyncGenerator[News, None]:
    """Yields new tokens of the requests, several at a time, until all end.

    Raises:
      BrokenError: the engine has failed.
    """
    while self.unread:
      arrived = await self._arrived.get()
      if isinstance(arrived, Exception):
        raise arrived
      news = [(n, token) for n, token in arrived if n in self.unread]
      self.unread -= {n for n, token in news if token.finish}
      yield news


class Worker:
  """Runs an engine in its own thread; used from one event loop.

  Attributes:
    capacity: maximum number of running and waiting requests.
    broken: whether the engine has failed.
  """

  def __init__(
    self,
    engine: Engine,
    capacity: int,
    on_failure: Callable[[], None] = lambda: None,
  ):
    """Prepares the worker; `start` starts the thread.

    Args:
      engine: the engine, which nothing else may use from now on.
      capacity: maximum number of running and waiting requests.
      on_failure: called in the event loop if the engine fails.
    """
    self.capacity = capacity
    self._engine, self._on_failure = engine, on_failure
    self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
    self._thread = threading.Thread(
      target=self._run, name="engine", daemon=True
    )
    self.broken = False
    # Used by the event loop: the unfinished requests of each job.
    self._running: dict[Job, set[int]] = {}
    # Used by the thread: engine request number -> (job, index in the job).
    self._owners: dict[int, tuple[Job, int]] = {}
    self._stopping = False

  def start(self) -> None:
    """Starts the thread; must be called in the event loop it will report to."""
    self._loop = asyncio.get_running_loop()
    self._thread.start()

  async def stop(self) -> None:
    """Stops the thread after its current step; running requests are dropped."""
    self._commands.put(self._end)
    await asyncio.to_thread(self._thread.join)

  @property
  def healthy(self) -> bool:
    """Whether the thread is alive and the engine has not failed."""
    return self._thread.is_alive() and not self.broken

  @property
  def num_live(self) -> int:
    """Number of running and waiting requests."""
    return sum(map(len, self._running.values()))

  async def submit(self, requests: Sequence[GenerationRequest]) -> Job:
    """Passes requests to the engine, all of them or none.

    Raises:
      FullError: there is no room for them.
      BrokenError: the engine has failed.
      UserError: the engine refuses one of them.
    """
    if not self.healthy:
      raise BrokenError
    if self.num_live + len(requests) > self.capacity:
      raise FullError
    job = Job(requests)
    self._running[job] = set(job.unread)
    self._commands.put(functools.partial(self._add, job))
    try:
      await job.accepted
    except BaseException:
      self.cancel(job)
      raise
    return job

  def cancel(self, job: Job, numbers: Collection[int] | None = None) -> None:
    """Cancels the given requests of a job, or all if None.

    Requests that have ended are ignored. The slots are free after the current
    step.
    """
    numbers = job.unread if numbers is None else numbers
    ended = self._running.get(job, set()).intersection(numbers)
    job.unread -= set(numbers)
    if ended:
      self._leave(job, ended)
      self._commands.put(functools.partial(self._drop, job, ended))

  # Called in the event loop, by callbacks from the thread.

  def _leave(self, job: Job, ended: set[int]) -> None:
    left = self._running.get(job, set()) - ended
    if left:
      self._running[job] = left
    else:
      self._running.pop(job, None)

  def _answer(self, job: Job, refusal: UserError | None) -> None:
    if job.accepted.done():  # Its client has disconnected.
      return
    if refusal:
      job.accepted.set_exception(refusal)
    else:
      job.accepted.set_result(None)

  def _deliver(self, news: dict[Job, News]) -> None:
    for job, tokens in news.items():
      self._leave(job, {n for n, token in tokens if token.finish})
      job.put(tokens)

  def _fail(self) -> None:
    self.broken = True
    for job in list(self._running):
      job.put(BrokenError())
      if not job.accepted.done():
        job.accepted.set_exception(BrokenError())
    self._running.clear()
    self._on_failure()

  # Called in the thread.

  def _run(self) -> None:
    try:
      while not self._stopping:
        self._obey()
        if not self._stopping and not self._engine.idle:
          self._step()
    except Exception:  # Whatever the device or the program raises.
      traceback.print_exc()
      self._loop.call_soon_threadsafe(self._fail)

  def _obey(self) -> None:
    """Executes queued commands; waits for one while the engine is idle."""
    if self._engine.idle:
      self._commands.get()()
    while not self._stopping:
      try:
        command = self._commands.get_nowait()
      except queue.Empty:
        return
      command()

  def _step(self) -> None:
    news: dict[Job, News] = collections.defaultdict(list)
    for token in self._engine.step():
      job, number = self._owners[token.request_id]
      news[job].append((number, token))
      if token.finish:
        del self._owners[token.request_id]
    if news:
      self._loop.call_soon_threadsafe(self._deliver, dict(news))

  def _add(self, job: Job) -> None:
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
    self._loop.call_soon_threadsafe(self._answer, job, refusal)

  def _drop(self, job: Job, numbers: set[int]) -> None:
    for x, (owner, number) in list(self._owners.items()):
      if owner is job and number in numbers:
        self._engine.cancel(x)
        del self._owners[x]

  def _end(self) -> None:
    self._stopping = True
