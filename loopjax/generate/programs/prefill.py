"""Prefill, with all loops or, except for the last token, with fewer.

After prefill with m loops, the cache equals that of tokens that exited after
loop m (`exits.ExitPolicy.kept`). The last token runs all loops, like a
generated one, so no token is predicted with fewer.
"""

from typing import Any

import jax.numpy as jnp

from loopjax.generate.programs.cached_model import CachedModel
from loopjax.generate.programs.slots import PromptChunks
from loopjax.types import Array


def read(
  cached_model: CachedModel,
  model: Any,
  chunks: PromptChunks,
  cache: Any,
  span: int | None,
) -> tuple[Array, Array, Any]:
  """Prefills the next tokens of P prompts.

  Args:
    cached_model: the model without its parameters.
    model: the model with them.
    chunks: the tokens.
    cache: of the tokens before them.
    span: see `CachedModel.read`.

  Returns:
    (the output layer's input for each row's last token [P, D], the number of
    loops that it ran f32 [P], the cache).
  """
  tokens, valid, slots = chunks.tokens, chunks.valid, chunks.slots
  each = jnp.arange(len(tokens))
  last = jnp.maximum(jnp.sum(valid, axis=1) - 1, 0)
  fewer, alone = chunks.num_loops, None
  if fewer is not None:  # In some rows the last token is read by itself.
    alone = chunks.is_last & (fewer > 0)
    is_last = jnp.arange(tokens.shape[1])[None] == last[:, None]
    valid &= ~(alone[:, None] & is_last)
  output, cache = cached_model.read(
    model,
    tokens,
    cache,
    valid=valid,
    num_loops=slots.num_loops
    if fewer is None
    else jnp.where(fewer > 0, fewer, slots.num_loops),
    exit_threshold=slots.exit_threshold,
    span=span,
    fills=fewer is not None,
  )
  hidden, loops = output.hidden[each, last], output.stats["loops_run"]
  if alone is None:
    return hidden, loops, cache
  output, cache = cached_model._replace(exit_rule="fixed").read(
    model,
    tokens[each, last][:, None],
    cache,
    valid=alone[:, None],
    num_loops=slots.num_loops,
    exit_threshold=slots.exit_threshold,
    span=span,
  )
  return (
    jnp.where(alone[:, None], output.hidden[:, 0], hidden),
    jnp.where(alone, output.stats["loops_run"], loops),
    cache,
  )
