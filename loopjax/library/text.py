"""Texts of a model, by the engine of `loopjax generate`."""

import dataclasses
import functools
import pathlib
import threading
from collections.abc import Sequence
from typing import Any

from loopjax import checks
from loopjax.data.text import tokenizer as tokenizer_lib
from loopjax.data.text.config import Config as TextConfig
from loopjax.errors import UserError
from loopjax.generate import source, text_flags
from loopjax.generate import text as text_lib
from loopjax.generate.engine import Engine
from loopjax.generate.requests import GenerationRequest
from loopjax.generate.sampling import Sampling
from loopjax.hub import convert
from loopjax.library import checked
from loopjax.saved import language_model as language_model_lib

_SLOTS = 8  # Texts that are generated at once.
_ONE_AT_A_TIME = threading.Lock()  # An engine has one caller.


def generate(
  model: Any,
  prompt: str | Sequence[str],
  *,
  max_new_tokens: int | None = None,
  num_loops: int | None = None,
  temperature: float = 1.0,
  top_k: int = 0,
  top_p: float = 1.0,
  min_p: float = 0.0,
  repetition_penalty: float = 1.0,
  seed: int = 0,
  stop: str | Sequence[str] = (),
  bos: str | None = None,
) -> Any:
  """Returns a language model's continuation of a prompt.

  Calls from several threads run one after another.

  Args:
    prompt: the text to continue; or several, for a list of continuations,
      each the same as alone (up to the rounding of a batch).
    max_new_tokens: maximum number of tokens to generate; 256, or as many as fit
      into the model's context length after the prompt, if None.
    num_loops: number of loops per token; as in evaluation if None.
    temperature: divides the logits; 0 for greedy decoding.
    top_k, top_p, min_p, repetition_penalty: as in `Sampling`.
    seed: seed of the random numbers; of the first of several prompts, whose
      seeds are counted up.
    stop: one string or several; the text ends before any of them.
    bos: the token at the beginning of the prompt: one of the tokenizer,
      "none" for nothing, of a model that was trained without one, or None for
      the token of the task.
  """
  seed = checked.seed(seed)
  sampling = Sampling(
    temperature, top_k, top_p, min_p, repetition_penalty, seed=seed
  )
  several = isinstance(prompt, list | tuple)
  prompts: Any = prompt if several else [prompt]
  stops: Any = stop if isinstance(stop, list | tuple) else [stop]
  for name, values in (("prompt", prompts), ("stop", stops)):
    for value in values:
      if not isinstance(value, str):
        raise UserError(f"{name}={value!r} must be a string")
      checks.unicode(name, value)
  if "" in stops:
    raise UserError("stop='' is empty; expected a string that ends the text")
  if not prompts:
    return []
  settings = model.about.settings
  loops = checked.loops(settings, num_loops, settings.eval_loops)
  slots = min(len(prompts), _SLOTS)
  with _ONE_AT_A_TIME:
    language_model, engine = _generator(model, loops, bos, slots)
    tokenizer, requests = language_model.tokenizer, []
    for number, tokens in enumerate(map(tokenizer.encode_prompt, prompts)):
      if max_new_tokens is not None:
        max_new_tokens = checked.integer("max_new_tokens", max_new_tokens, 1)
        engine.limits.check_room("max_new_tokens", max_new_tokens, len(tokens))
      seed = (sampling.seed + number) % 2**32
      request = GenerationRequest(
        tokens,
        max_new_tokens or text_flags.MAX_NEW_TOKENS,
        dataclasses.replace(sampling, seed=seed),
        stop_tokens=language_model.stop_tokens,
      )
      requests.append(request)
    try:
      found = text_lib.generate_texts(engine, tokenizer, requests, stops)
    except UserError:
      raise
    except BaseException:
      _generator.cache_clear()  # Its engine is in the middle of a step.
      raise
  texts = [one.text for one in found]
  return texts if several else texts[0]


@functools.lru_cache(maxsize=2)  # An engine keeps what it has compiled.
def _generator(
  model: Any, num_loops: int, bos: str | None, num_slots: int
) -> tuple[language_model_lib.LanguageModel, Engine]:
  settings = model.about.settings
  reading = settings.family.reading
  if reading is None or not isinstance(settings.task, TextConfig):
    raise UserError(
      f"a model {settings.model_name!r} of the task"
      f" {settings.plain['task']['name']!r} does not generate text"
    )
  tokenizer = tokenizer_lib.of(settings.task).beginning_with(bos, "bos")
  files, length = hub_files(model), model.spec.sequence_length
  if files:
    length = language_model_lib.context_length(length, files)
  language_model = language_model_lib.LanguageModel(
    tokenizer=tokenizer,
    stop_tokens=language_model_lib.stop_tokens(tokenizer, files)
    if files
    else (tokenizer.end,),
    context_length=length,
    graphdef=model.graphdef,
    params=model.params,
    call={"num_loops": num_loops},
    facts={"model": settings.model_name},
  )
  return language_model, source.make_engine(
    language_model, num_slots=num_slots, max_tokens=length
  )


def hub_files(model: Any) -> pathlib.Path | None:
  """Where tokenizer and config of a model of the Hub are; None if built."""
  folder = model.about.folder
  if folder is None or convert.is_folder(folder):
    return folder
  return folder / convert.DIRECTORY
