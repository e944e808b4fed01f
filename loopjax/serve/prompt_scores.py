"""Log-probabilities of a prompt's tokens, for answers that echo the prompt."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from loopjax.generate.programs import sizes
from loopjax.generate.requests import GeneratedToken
from loopjax.kernels.vocabulary import MASKED_LOGIT, product
from loopjax.saved.language_model import LanguageModel
from loopjax.types import PRECISIONS, Array

MAX_TOP = 20  # Alternatives of a token.
_LONGEST = 2**31 - 1
_CHUNK = 128  # Tokens whose logits are computed together.


class PromptScorer:
  """Scores prompts as `loopjax.eval.scorer` does, with alternatives."""

  def __init__(self, language_model: LanguageModel):
    """Compiles nothing yet: each length is compiled at its first use."""
    self._params = language_model.params
    self._run = jax.jit(
      functools.partial(
        _scores, graphdef=language_model.graphdef, call=language_model.call
      )
    )

  def __call__(self, prompt: Sequence[int]) -> list[GeneratedToken]:
    """The tokens after the first one, each given all tokens before it."""
    num = len(prompt) - 1
    if not num:
      return []
    inputs, targets = np.zeros((2, sizes.span(num, _LONGEST)), np.int32)
    inputs[:num], targets[:num] = prompt[:-1], prompt[1:]
    found = self._run(self._params, inputs, targets)
    scores, top, ids = (np.asarray(x)[:num].tolist() for x in found)
    return [
      GeneratedToken(
        0, token, score, tuple(zip(best, values, strict=True)), 0, None
      )
      for token, score, best, values in zip(
        prompt[1:], scores, ids, top, strict=True
      )
    ]


def _scores(
  params: Any,
  inputs: Array,
  targets: Array,
  *,
  graphdef: nnx.GraphDef,
  call: dict[str, Any],
) -> tuple[Array, Array, Array]:
  """Log-probabilities of targets, and the most likely tokens.

  Args:
    params: the model's parameters.
    inputs: i32 [T].
    targets: i32 [T], the token after each input.
    graphdef: the model without its parameters.
    call: keyword arguments of the model's call.

  Returns:
    f32 [T] in nats; f32 [T, n] and i32 [T, n], n = 20 or, if there are fewer,
    all tokens, in descending order.
  """
  model: Any = nnx.merge(graphdef, params)
  compute = PRECISIONS[model.config.precision].compute
  table = model.readout_table().astype(compute)
  num_real = model.spec.num_tokens
  is_real = jnp.arange(len(table)) < num_real
  hidden = model(inputs[None], **call).hidden[0].astype(compute)
  size = min(_CHUNK, len(hidden))
  missing = -len(hidden) % size

  def step(part: tuple[Array, Array]) -> tuple[Array, Array, Array]:
    logits = product("td,vd->tv", part[0], table).astype(jnp.float32)
    scores = jax.nn.log_softmax(jnp.where(is_real, logits, MASKED_LOGIT))
    wanted = jnp.take_along_axis(scores, part[1][:, None], axis=1)
    return (wanted[:, 0], *jax.lax.top_k(scores, min(MAX_TOP, num_real)))

  found = jax.lax.map(
    step,
    (
      jnp.pad(hidden, ((0, missing), (0, 0))).reshape(-1, size, table.shape[1]),
      jnp.pad(targets, (0, missing)).reshape(-1, size),
    ),
  )
  flat = [x.reshape(-1, *x.shape[2:])[: len(targets)] for x in found]
  return flat[0], flat[1], flat[2]
