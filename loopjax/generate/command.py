"""The command: texts to the terminal as they are written."""

import collections
import dataclasses
import pathlib
import sys
import time
from typing import NamedTuple

from loopjax.errors import UserError
from loopjax.generate import chat, source
from loopjax.generate.engine import Engine
from loopjax.generate.requests import GenerationRequest, Token
from loopjax.generate.sampling import Sampling
from loopjax.generate.text import Text
from loopjax.hub import convert
from loopjax.language_model import LanguageModel


class Options(NamedTuple):
  """The flags, see `loopjax.generate.__main__`."""

  model: source.Flags
  prompt: str | None
  chat: bool
  max_new_tokens: int
  samples: int
  stop: list[str]
  sampling: Sampling
  exit_threshold: float
  prompt_tokens: int
  report: bool


def run(options: Options) -> None:
  """Writes.

  Raises:
    UserError: flags that contradict each other, a model that cannot be read, or
      a text that it has no room for.
  """
  _check(options)
  language_model = source.load(options.model)
  writer = _Writer(language_model, options)
  if options.chat:
    flags = options.model
    folder = flags.hub or flags.folder / convert.DIRECTORY
    _talk(writer, folder, options)
  else:
    assert options.prompt is not None
    prompt = source.opened(language_model.tokenizer, options.prompt)
    writer.write(prompt, show=options.prompt)
  if options.report:
    print(writer.report(), file=sys.stderr)


class _Writer:
  """Writes texts with an engine, and counts what that takes."""

  def __init__(self, language_model: LanguageModel, options: Options):
    self._language_model, self._options = language_model, options
    self._engine: Engine = source.engine_of(
      language_model,
      options.model,
      num_slots=options.samples,
      prompt_tokens=options.prompt_tokens,
    )
    self._seconds = self._first = 0.0
    self._loops: collections.Counter[int] = collections.Counter()

  def encode(self, text: str) -> tuple[int, ...]:
    """Token ids of a text, special tokens that are written out included."""
    (ids,) = self._language_model.tokenizer.encode([text])
    return tuple(ids.tolist())

  def write(self, prompt: tuple[int, ...], show: str = "") -> list[str]:
    """The texts after a prompt; they are printed, a single one as it grows.

    Args:
      prompt: token ids.
      show: what is printed before each text.
    """
    options, seed = self._options, self._options.sampling.seed
    numbers = [
      self._engine.add(
        GenerationRequest(
          prompt=prompt,
          max_new_tokens=options.max_new_tokens,
          sampling=dataclasses.replace(
            options.sampling, seed=(seed + n) % 2**32
          ),
          stop_tokens=(self._language_model.tokenizer.end,),
          num_loops=0,
          exit_threshold=options.exit_threshold,
        )
      )
      for n in range(options.samples)
    ]
    texts = {
      number: Text(self._language_model.tokenizer, options.stop, prompt)
      for number in numbers
    }
    alone = len(texts) == 1
    print(show if alone else "", end="", flush=True)
    started = time.monotonic()
    while not self._engine.idle:
      for token in self._engine.step():
        self._first = self._first or time.monotonic() - started
        self._read(token, texts[token.request], alone)
    self._seconds += time.monotonic() - started
    if alone:
      print(flush=True)
    for number, text in texts.items() if not alone else ():
      print(f"--- {number + 1} ({text.finish})\n{show}{text.text}", flush=True)
    return [text.text for text in texts.values()]

  def _read(self, token: Token, text: Text, alone: bool) -> None:
    """Takes a token, of which there are some after the end of a text."""
    if text.finish:
      return
    self._loops[token.loops] += 1
    added = text.read([token])
    if alone:
      print(added, end="", flush=True)
    if text.finish and not token.finish:  # A stop that is no token.
      self._engine.cancel(token.request)

  def report(self) -> str:
    """Speed, loops, and memory, several lines."""
    engine, total = self._engine, sum(self._loops.values())
    loops = sum(n * count for n, count in self._loops.items())
    rate = total / self._seconds if self._seconds else 0.0
    lines = [
      f"{total} tokens in {self._seconds:.2f} s, {rate:.1f} tokens/s; the"
      f" first after {self._first:.2f} s, in which programs are compiled",
      f"{loops / max(total, 1):.3f} of {engine.num_loops} loops a token;"
      f" exits: {engine.exit_rule}, threshold {self._options.exit_threshold}",
      *(
        f"  read out after loop {n}: {count / total:.1%}"
        for n, count in sorted(self._loops.items())
      ),
      f"cache: {engine.cache_kind}, {engine.cache_bytes:,} bytes for"
      f" {engine.num_slots} text(s) of "
      + (f"{engine.max_tokens} tokens" if engine.max_tokens else "any length"),
    ]
    if self._options.model.exit_kept == "computed":
      lines.append("all loops are computed: exits save no time")
    return "\n".join(lines)


def _talk(writer: _Writer, folder: pathlib.Path, options: Options) -> None:
  """Answers what is said, line by line, until there is no more."""
  prompt_of = chat.template(folder)
  messages: list[dict[str, str]] = []
  said = options.prompt
  while True:
    if said is None:
      print("> ", end="", flush=True)
      try:
        said = sys.stdin.readline()
      except UnicodeDecodeError as error:
        raise UserError(f"what was typed is not UTF-8: {error}") from None
      _check_unicode(said, "what was typed")
      if not said:
        print()
        return
    if said.strip():
      messages.append({"role": "user", "content": said.strip()})
      (answer,) = writer.write(writer.encode(prompt_of(messages)))
      messages.append({"role": "assistant", "content": answer})
    said = None


def _check(options: Options) -> None:
  """Raises UserError for flags that contradict each other."""
  source.check(options.model)
  if options.prompt is None and not options.chat:
    raise UserError("give --prompt=TEXT, or --chat")
  for name, texts in (
    ("prompt", [options.prompt or ""]),
    ("stop", options.stop),
  ):
    for text in texts:
      _check_unicode(text, f"--{name}")
  if options.samples < 1:
    raise UserError(f"--samples={options.samples} must be at least 1")
  if options.chat and options.samples > 1:
    raise UserError(f"--samples={options.samples}: a chat has one answer")


def _check_unicode(text: str, name: str) -> None:
  """Raises UserError for bytes of a terminal that were no UTF-8."""
  try:
    text.encode()
  except UnicodeEncodeError:
    raise UserError(f"{name} is not UTF-8") from None
