"""The command: prints texts to the terminal as they are generated."""

import dataclasses
import json
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from loopjax import checks
from loopjax.data.text import chat, files
from loopjax.errors import UserError
from loopjax.generate import source, text_flags
from loopjax.generate.engine import Engine
from loopjax.generate.requests import Costs, GeneratedToken, GenerationRequest
from loopjax.generate.text import TextStream, each_text
from loopjax.saved.language_model import LanguageModel

_SLOTS = 8  # Default number of texts of a file that are generated together.


class Options(NamedTuple):
  """The flags; see `loopjax.generate.__main__`."""

  model: source.ModelFlags
  text: text_flags.TextFlags
  prompt: str | None
  prompts: pathlib.Path | None
  slots: int | None
  chat: bool
  report: bool


def run(options: Options) -> None:
  """Continues a prompt or the prompts of a file, or chats.

  Raises:
    UserError: flags contradict each other, the model cannot be read, or a
      prompt or --max_new_tokens is too long.
  """
  _check(options)
  language_model = source.load(options.model)
  writer = _Writer(language_model, options)
  if options.chat:
    writer.check_room(1)
    _talk(writer, options)
  elif options.prompts:
    writer.write_lines(read_prompts(options.prompts))
  else:
    assert options.prompt is not None
    prompt = language_model.tokenizer.encode_prompt(options.prompt)
    writer.check_room(len(prompt))
    writer.write(prompt, show=options.prompt)
  if options.report:
    print(writer.report(), file=sys.stderr)


class _Writer:
  """Generates and prints texts, and measures time and loops."""

  def __init__(self, language_model: LanguageModel, options: Options):
    self._language_model, self._options = language_model, options
    self._text = options.text
    self._engine: Engine = source.engine_from_flags(
      language_model,
      options.model,
      num_slots=_num_slots(options),
      prefix_mib=0 if options.prompt else source.PREFIX_MIB,
    )
    max_new_tokens = options.text.max_new_tokens
    self._max_new_tokens = (
      text_flags.MAX_NEW_TOKENS if max_new_tokens is None else max_new_tokens
    )
    self._started = self._seconds = self._first = 0.0
    self._at_first = 0  # Tokens that came with the first.
    self._costs = Costs()

  def encode(self, text: str) -> tuple[int, ...]:
    """Token ids of a text, in which special tokens may be spelled out."""
    (ids,) = self._language_model.tokenizer.encode([text])
    return tuple(ids.tolist())

  @property
  def max_tokens(self) -> int | None:
    """Maximum length of a prompt, in tokens; None for any length."""
    return self._engine.limits.max_tokens

  def has_room(self, prompt: tuple[int, ...]) -> bool:
    """Whether a prompt fits, and leaves half of the room for new tokens."""
    room = self.max_tokens
    if room is None:
      return True
    return len(prompt) + min(self._max_new_tokens, room // 2) <= room

  def check_room(self, num_prompt: int) -> None:
    """Raises UserError if --max_new_tokens is given and does not fit."""
    max_new_tokens = self._text.max_new_tokens
    if max_new_tokens is not None:
      self._engine.limits.check_room(
        "--max_new_tokens", max_new_tokens, num_prompt
      )

  def write(self, prompt: tuple[int, ...], show: str = "") -> list[str]:
    """Generates and prints the samples of a prompt; returns their texts.

    A single sample is printed as it is generated, several when all have ended.

    Args:
      prompt: token ids.
      show: printed before each sample.
    """
    texts = {
      self._engine.add(self._request(prompt, n)): TextStream(
        self._language_model.tokenizer, self._text.stop, prompt
      )
      for n in range(self._text.samples)
    }
    is_single = len(texts) == 1
    print(show if is_single else "", end="", flush=True)
    self._started = time.monotonic()
    while not self._engine.idle:
      tokens = self._engine.step()
      self._notice(tokens)
      for token in tokens:
        self._read(token, texts[token.request_id], is_single)
    self._seconds += time.monotonic() - self._started
    for text in texts.values():
      self._costs += text.costs
    if is_single:
      print(flush=True)
    for number, text in texts.items() if not is_single else ():
      print(f"--- {number + 1} ({text.finish})\n{show}{text.text}", flush=True)
    return [text.text for text in texts.values()]

  def write_lines(self, rows: list[dict[str, Any]]) -> None:
    """Generates the samples of each prompt; prints them as JSON lines.

    Args:
      rows: from `read_prompts`.
    """
    tokenizer, samples = self._language_model.tokenizer, self._text.samples
    requests: list[GenerationRequest] = []
    for row in rows:
      prompt = tokenizer.encode_prompt(row["prompt"])
      self.check_room(len(prompt))
      requests += [
        self._request(prompt, len(requests) + n) for n in range(samples)
      ]
    for request in requests:
      self._engine.limits.check(request)
    self._started = time.monotonic()
    texts = each_text(
      self._engine, tokenizer, requests, self._text.stop, self._notice
    )
    for number, text in enumerate(texts):
      self._costs += text.costs
      row, sample = rows[number // samples], number % samples
      print(prompt_line(row, sample, text), flush=True)
    self._seconds += time.monotonic() - self._started

  def _notice(self, tokens: Sequence[GeneratedToken]) -> None:
    """Keeps when the first tokens came, and how many."""
    if tokens and not self._first:
      self._first = time.monotonic() - self._started
      self._at_first = len(tokens)

  def _request(self, prompt: tuple[int, ...], number: int) -> GenerationRequest:
    """The request for a text, whose seed is the flags' seed plus a number."""
    flags = self._text
    seed = (flags.sampling.seed + number) % 2**32
    return GenerationRequest(
      prompt=prompt,
      max_new_tokens=self._max_new_tokens,
      sampling=dataclasses.replace(flags.sampling, seed=seed),
      stop_tokens=self._language_model.stop_tokens,
      exit_threshold=flags.exit_threshold,
      prefill_loops=flags.prefill_loops,
    )

  def _read(
    self, token: GeneratedToken, text: TextStream, is_single: bool
  ) -> None:
    """Adds a token to its text; tokens after a stop string are ignored."""
    if text.finish:
      return
    added = text.read([token])
    if is_single:
      print(added, end="", flush=True)
    if text.finish and not token.finish:  # A stop string, not a stop token.
      self._engine.cancel(token.request_id)

  def report(self) -> str:
    """Speed, loops and memory, in several lines."""
    engine, total, loops = self._engine, self._costs.tokens, self._costs.loops
    limits, max_tokens = engine.limits, engine.limits.max_tokens
    later, seconds = total - self._at_first, self._seconds - self._first
    after = (
      f"; then {later / seconds:,.0f} tokens/s" if later and seconds else ""
    )
    params = jax.tree.leaves(self._language_model.params)
    lines = [
      f"{total} tokens in {self._seconds:.2f} s; first token after"
      f" {self._first:.2f} s, including compilation{after}",
      f"{loops / max(total, 1):.3f} of {limits.num_loops} loops per token;"
      f" exits: {limits.exit_rule}, threshold {self._text.exit_threshold}",
      *(
        f"  exited after loop {n}: {count / total:.1%}"
        for n, count in sorted(self._costs.exits.items())
      ),
      f"parameters: {sum(x.nbytes for x in params):,} bytes",
      f"cache: {engine.cache_kind}, {engine.cache_bytes:,} bytes for"
      f" {engine.num_slots} text(s) of "
      + (f"{max_tokens} tokens" if max_tokens else "any length"),
    ]
    if self._options.model.exit_kept == "computed":
      lines.append("all loops are computed: early exits save no time")
    return "\n".join(lines)


def _talk(writer: _Writer, options: Options) -> None:
  """Answers the lines of standard input until it ends."""
  prompt_of = chat.template(source.template_folder(options.model))
  messages: list[dict[str, str]] = []
  line = options.prompt
  while True:
    if line is None:
      print("> ", end="", flush=True)
      try:
        line = sys.stdin.readline()
      except UnicodeDecodeError as error:
        raise UserError(f"the input is not UTF-8: {error}") from None
      checks.unicode("the input", line)
      if not line:
        print()
        return
    if line.strip():
      said = [*messages, {"role": "user", "content": line.strip()}]
      try:
        prompt = _shortened(writer, said, prompt_of)
      except _TooLongError as error:
        if line is options.prompt:
          raise
        print(f"(not read: {error})")
      else:
        (answer,) = writer.write(prompt)
        messages = [*said, {"role": "assistant", "content": answer}]
    line = None


class _TooLongError(UserError):
  """A message is longer than the model's context."""


def _shortened(
  writer: _Writer,
  messages: list[dict[str, str]],
  prompt_of: chat.Template,
) -> tuple[int, ...]:
  """The prompt of a conversation; without its first messages, if too long."""
  before = len(messages)
  prompt = writer.encode(prompt_of(messages))
  while len(messages) > 1 and not writer.has_room(prompt):
    del messages[:2]  # A message of the user, and its answer.
    prompt = writer.encode(prompt_of(messages))
  if (room := writer.max_tokens) and len(prompt) > room:
    raise _TooLongError(
      f"{len(prompt)} tokens, but there is room for {room}: --max_tokens"
    )
  if dropped := before - len(messages):
    print(f"(dropped the first {dropped} messages to fit --max_tokens)")
  return prompt


def _num_slots(options: Options) -> int:
  """How many texts are generated at once."""
  if options.prompts is None:
    return options.text.samples
  return _SLOTS if options.slots is None else options.slots


def _check(options: Options) -> None:
  """Raises UserError for flags that contradict each other."""
  source.check(options.model, chat=options.chat)
  has_prompt = options.prompt is not None or options.chat
  if has_prompt == (options.prompts is not None):
    raise UserError("pass one of --prompt=TEXT, --prompts=FILE and --chat")
  if options.slots is not None and not options.prompts:
    raise UserError(f"--slots={options.slots} has no effect without --prompts")
  checks.unicode("--prompt", options.prompt or "")
  text_flags.check(options.text, options.model)
  if options.chat and options.text.samples > 1:
    raise UserError(
      f"--samples={options.text.samples} has no effect with --chat"
    )


def read_prompts(path: pathlib.Path) -> list[dict[str, Any]]:
  """The lines of a file, each an object with a string "prompt".

  Raises:
    UserError: the file cannot be read, is empty, or a line is something else.
  """
  rows = []
  for where, row in files.json_lines(path):
    prompt = row.get("prompt") if isinstance(row, dict) else None
    if not isinstance(prompt, str):
      raise UserError(f"{where}: needs a string 'prompt'")
    try:
      prompt.encode()
    except UnicodeEncodeError:
      raise UserError(f"{where}: its 'prompt' is not valid Unicode") from None
    rows.append(row)
  if not rows:
    raise UserError(f"{path}: contains no prompts")
  return rows


def prompt_line(row: dict[str, Any], sample: int, text: TextStream) -> str:
  """A line of JSON: the prompt's fields and its text.

  Args:
    row: the prompt's line.
    sample: the index of the text for its prompt.
    text: the text.
  """
  new = {
    "sample": sample,
    "text": text.text,
    "finish": text.finish,
    "tokens": text.costs.tokens,
    "loops": text.costs.loops,
  }
  return json.dumps(row | new, ensure_ascii=False)
