"""Command line: `loopjax answers RUN --questions=FILE`.

With --samples=16 --k=1,10 --temperature=1 --top_p=0.7 these are the scores of
MELT's table 1 and, with --cache_kind, of its table 5 (arXiv 2605.07721).

If the process is killed, the same command resumes with the missing answers.
"""

import dataclasses
import hashlib
import pathlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from loopjax import checks
from loopjax.data.text import chat
from loopjax.errors import Parser, UserError, leave, one_line_errors
from loopjax.eval.answers import questions as questions_lib
from loopjax.eval.answers import scores, stored
from loopjax.eval.answers.questions import Question
from loopjax.eval.answers.stored import Key
from loopjax.generate import source, text_flags
from loopjax.generate.engine import Engine
from loopjax.generate.requests import Costs, GenerationRequest
from loopjax.generate.text import TextStream
from loopjax.run import provenance, user_cache, zoo
from loopjax.run import workdir as workdir_lib
from loopjax.saved.language_model import LanguageModel

QUESTION = "{question}"  # The question in --template.


class Options(NamedTuple):
  """The flags."""

  model: source.ModelFlags
  text: text_flags.TextFlags
  questions: pathlib.Path
  limit: int
  template: str
  chat: bool
  check: str
  ignore_case: bool
  k: str
  slots: int
  out: pathlib.Path | None


class Sample(NamedTuple):
  """An answer to generate.

  Attributes:
    question: the question.
    number: number of the sample for its question, from 0.
  """

  question: Question
  number: int

  @property
  def key(self) -> Key:
    return self.question.number, self.number


def run(options: Options) -> None:
  """Generates missing answers; writes and prints the scores.

  Raises:
    UserError: a flag is out of range or has no effect, a file cannot be read,
      or it has answers generated with other settings.
  """
  ks = _check(options)
  questions = questions_lib.read(options.questions, options.limit)
  is_right = questions_lib.make_check(
    options.check, questions, options.ignore_case
  )
  model = source.load(options.model)
  engine = source.engine_from_flags(
    model, options.model, num_slots=options.slots
  )
  facts, path = _facts(options, model, engine), _path(options)
  samples = [
    Sample(question, number)
    for question in questions
    for number in range(options.text.samples)
  ]
  with stored.opened(path, facts) as answers:
    missing = [one for one in samples if one.key not in answers.by_key]
    requests = _requests(missing, model, engine, options)
    started, costs = time.monotonic(), Costs()
    for key, row in _generate(requests, model, engine, options, costs):
      answer = questions[key[0]].answer
      right = is_right(row["text"], answer)
      answers.add(key, {"answer": answer, "right": right, **row})
    seconds = time.monotonic() - started
  metrics = scores.metrics_of(
    [answers.by_key[one.key] for one in samples], options.text.samples, ks
  )
  result = {
    "task": options.questions.name,
    "workdir": str(options.model.folder),
    "metrics": metrics,
    "samples": options.text.samples,
    **facts,
    **provenance.environment(),
  }
  workdir_lib.write_json(path.with_suffix(".json"), result)
  if missing:
    print(
      f"{len(missing)} answers generated in {seconds:.0f} s, including"
      f" compilation; cache: {engine.cache_bytes:,} bytes for"
      f" {engine.num_slots} in parallel"
    )
  print(f"{path}\n\n{scores.table(metrics, options.text.samples, ks)}")


def _generate(
  requests: dict[Key, GenerationRequest],
  model: LanguageModel,
  engine: Engine,
  options: Options,
  costs: Costs,
) -> Iterator[tuple[Key, dict[str, Any]]]:
  """Yields finished answers (key, text and costs) and stores them."""
  unfinished: dict[int, tuple[Key, TextStream]] = {}
  for key, request in requests.items():
    stream = TextStream(model.tokenizer, options.text.stop, request.prompt)
    unfinished[engine.add(request)] = key, stream
  with tqdm(total=len(requests), disable=None, unit="answer") as progress:
    while not engine.idle:
      for token in engine.step():
        if token.request_id not in unfinished:
          continue  # A stop string ended its text.
        key, text = unfinished[token.request_id]
        text.read([token])
        if not text.finish:
          continue
        if not token.finish:
          engine.cancel(token.request_id)
        del unfinished[token.request_id]
        progress.update()
        costs += text.costs
        yield (
          key,
          {
            "finish": text.finish,
            "num_tokens": text.costs.tokens,
            "num_loops": text.costs.loops,
            "text": text.text,
          },
        )


def _requests(
  samples: Sequence[Sample],
  model: LanguageModel,
  engine: Engine,
  options: Options,
) -> dict[Key, GenerationRequest]:
  """The requests to generate, by key; raises UserError if one does not fit."""
  prompt_of, flags = _prompts(options, model), options.text
  max_new_tokens = flags.max_new_tokens
  prompts = {
    one.question.number: prompt_of(one.question.text) for one in samples
  }
  min_room = max_new_tokens or 1
  for number, prompt in prompts.items():
    room = engine.limits.room(len(prompt))
    if room is not None and room < min_room:
      raise UserError(
        f"question {number}: after its prompt of {len(prompt)} tokens, there is"
        f" no room for {min_room} more, with"
        f" --max_tokens={engine.limits.max_tokens}"
      )
  return {
    one.key: GenerationRequest(
      prompt=prompts[one.question.number],
      max_new_tokens=text_flags.MAX_NEW_TOKENS
      if max_new_tokens is None
      else max_new_tokens,
      sampling=dataclasses.replace(
        flags.sampling, seed=_seed(flags.sampling.seed, *one.key)
      ),
      stop_tokens=model.stop_tokens,
      exit_threshold=flags.exit_threshold,
      prefill_loops=flags.prefill_loops,
    )
    for one in samples
  }


def _seed(seed: int, question: int, sample: int) -> int:
  """A seed for each sample: equal seeds would draw equal random numbers."""
  words = np.random.SeedSequence((seed, question, sample))
  return int(words.generate_state(1)[0])


def _prompts(
  options: Options, model: LanguageModel
) -> Callable[[str], tuple[int, ...]]:
  """A function from a question to the token ids of its prompt."""
  if not options.chat:
    return lambda question: model.tokenizer.encode_prompt(
      options.template.replace(QUESTION, question)
    )
  render = chat.template(source.template_folder(options.model))

  def prompt(question: str) -> tuple[int, ...]:
    content = options.template.replace(QUESTION, question)
    text = render([{"role": "user", "content": content}])
    (ids,) = model.tokenizer.encode([text])
    return tuple(ids.tolist())

  return prompt


def _facts(
  options: Options, model: LanguageModel, engine: Engine
) -> dict[str, Any]:
  """What an answer depends on besides its key; with --out, also the run."""
  flags = options.text
  return {
    "file": options.questions.name,
    "sha256": hashlib.sha256(options.questions.read_bytes()).hexdigest(),
    **{k: v for k, v in model.facts.items() if options.out or k != "workdir"},
    "chat": options.chat,
    "template": options.template,
    "check": options.check,
    **({"ignore_case": True} if options.ignore_case else {}),
    "sampling": dataclasses.asdict(flags.sampling),
    "max_new_tokens": flags.max_new_tokens,
    "stop": flags.stop,
    "num_loops": engine.limits.num_loops,
    "exit": {
      "rule": engine.limits.exit_rule,
      "kept": options.model.exit_kept,
      "threshold": flags.exit_threshold,
    },
    **{
      name: value
      for name, value in (("prefill_loops", flags.prefill_loops),)
      if value
    },
    "cache_kind": engine.cache_kind,
    "max_tokens": engine.limits.max_tokens,
    "dtype": options.model.dtype,
  }


def _path(options: Options) -> pathlib.Path:
  """The file of answers, named after the questions and some of the flags."""
  flags, text = options.model, options.text
  options_set = {
    "num_loops": flags.num_loops,
    "exit_rule": flags.exit_rule,
    "exit_threshold": None if text.exit_threshold == 1 else text.exit_threshold,
    "prefill_loops": text.prefill_loops or None,
    "cache_kind": flags.cache_kind,
    "checkpoint": flags.checkpoint,
    "bos": flags.bos,
  }
  name = options.questions.name.removesuffix(".gz").removesuffix(".jsonl")
  named = (f"{flag}={x}" for flag, x in options_set.items() if x is not None)
  folder = options.out or zoo.output(flags.folder) / "eval"
  return folder / f"{','.join([name, *named])}.answers.jsonl"


def _check(options: Options) -> tuple[int, ...]:
  """The values of --k; raises UserError for contradictory flags."""
  source.check(options.model, chat=options.chat)
  text_flags.check(options.text, options.model)
  checks.flags_at_least(options, limit=0, slots=1)
  checks.unicode("--template", options.template)
  if QUESTION not in options.template:
    raise UserError(
      f"--template={options.template!r} does not contain {QUESTION}"
    )
  samples = options.text.samples
  if samples > 1 and not options.text.sampling.temperature:
    raise UserError(f"--temperature=0 makes all --samples={samples} identical")
  try:
    ks = tuple(dict.fromkeys(int(part) for part in options.k.split(",")))
  except ValueError:
    raise UserError(
      f"--k={options.k} is invalid: expected numbers such as 1,10"
    ) from None
  for k in ks:
    if not 1 <= k <= samples:
      raise UserError(f"--k={k} is not in [1, {samples}], --samples={samples}")
  return ks


@one_line_errors
def main(argv: list[str] | None = None) -> int:
  """Generates answers and prints scores; returns the exit status."""
  parser = Parser(
    prog="loopjax answers",
    description=(
      "Generates a language model's answers to questions and scores them with"
      " pass@k. Run again, the command resumes with the missing answers."
    ),
  )
  source.add_flags(parser)
  parser.add_argument(
    "--questions",
    type=pathlib.Path,
    required=True,
    help='JSON lines with a "question" (or "problem") and an "answer"',
  )
  parser.add_argument(
    "--limit", type=int, default=0, help="use the first N questions [all]"
  )
  parser.add_argument(
    "--template",
    default=QUESTION,
    help=f"prompt template, containing {QUESTION} [{QUESTION}]",
  )
  parser.add_argument(
    "--chat", action="store_true", help="use the model's chat template"
  )
  parser.add_argument(
    "--check",
    choices=questions_lib.CHECKS,
    default=questions_lib.CHECKS[0],
    help="how to compare answers: by the last number, the last mathematical"
    " expression, the whole text, or whether the text contains the answer"
    f" [{questions_lib.CHECKS[0]}]",
  )
  parser.add_argument(
    "--ignore_case",
    action="store_true",
    help="letters of either case are equal in --check=exact and contains",
  )
  parser.add_argument(
    "--k", default="1", help="values of k for pass@k, for example 1,10 [1]"
  )
  parser.add_argument(
    "--slots",
    type=int,
    default=16,
    help="number of answers generated in parallel [16]",
  )
  parser.add_argument(
    "--out", type=pathlib.Path, help="output folder [RUN/eval]"
  )
  text_flags.add_flags(parser)
  options = vars(parser.parse_args(argv))
  text = text_flags.pop_flags(options)
  model = source.pop_flags(options)
  user_cache.keep_compiled()
  run(Options(model=model, text=text, **options))
  return 0


if __name__ == "__main__":
  leave(main())
