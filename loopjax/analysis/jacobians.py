"""Gradients and state Jacobians of the loops over one token.

MELT (arXiv 2605.07721, appendix E): the token is the last of a text, and the
tokens before it are fixed. The state S_t after loop t is the residual stream
and, for MELT, the latents of all layers.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from loopjax.kernels.gated_kv import reference
from loopjax.losses import tokens as token_losses
from loopjax.models import causal, looped, melt
from loopjax.models.melt import algorithm
from loopjax.types import Array

SATURATED = 0.9  # Gates above this, or below 1 - this, count as saturated.
_NUM_VECTORS, _NUM_ITERATIONS = 8, 50  # For the subspace iteration.


class Recurrence(NamedTuple):
  """The loops over the last token of each of B texts.

  Attributes:
    start: S_0 [B, N]; the first D numbers are the residual stream.
    step: function (S_{t-1}, t - 1) -> (S_t, the layers' inputs x in this loop
      [L, B, D]; None for a looped model).
    layers: the layers of MELT, with their gates; None for a looped model.
  """

  start: Array
  step: Callable[[Array, Array], tuple[Array, Any]]
  layers: Any


def measure(
  model: Any, tokens: Array, count: Array, targets: Array
) -> dict[str, Any]:
  """Gradients, spectral radii and gates by loop, means over texts.

  Args:
    model: a model of the family looped or melt.
    tokens: [B, T].
    count: number of tokens of each text, at least 2, i32 [B].
    targets: the target of each text's last token, i32 [B].

  Returns:
    The entries of a run in gradient_flow.json, see `gradient_flow`.
  """
  run = jax.jit(functools.partial(_of_texts, model))
  found = jax.device_get(run(tokens, count, targets))
  by_loop = {
    "gradient": {"hidden": found["hidden"].mean(axis=1).tolist()},
    "radius": radius(found["state"]).mean(axis=1).tolist(),
  }
  if "keep" in found:
    keep = found["keep"]  # [K - 1, L, B, D]
    every = (1, 2, 3)
    by_loop["gradient"]["latents"] = found["latents"].mean(axis=1).tolist()
    by_loop["latent"] = radius(found["latent"]).mean(axis=1).tolist()
    by_loop["gate"] = {
      "mean": keep.mean(axis=every).tolist(),
      "kept": (keep > SATURATED).mean(axis=every).tolist(),
      "replaced": (keep < 1 - SATURATED).mean(axis=every).tolist(),
    }
  return {
    "family": "melt" if "keep" in found else "looped",
    "texts": len(count),
    **by_loop,
  }


def _of_texts(
  model: Any, tokens: Array, count: Array, targets: Array
) -> dict[str, Array]:
  """Norms, Jacobians and gates of each text; for MELT also per layer."""
  width, loops = model.config.width, recurrence(model, tokens, count)
  number = jnp.arange(model.config.num_loops)

  def forward(state: Array, t: Array) -> Any:
    after, inputs = loops.step(state, t)
    return after, (state, inputs)

  end, (states, inputs) = jax.lax.scan(forward, loops.start, number)

  def loss(state: Array) -> Array:
    logits = model.logits(state[:, None, :width])[:, 0]
    return jnp.sum(token_losses.token_cross_entropy(logits, targets))

  def backward(gradient: Array, at: Any) -> Any:
    state, t = at
    _, pull_back = jax.vjp(lambda s: loops.step(s, t)[0], state)
    (before,) = pull_back(gradient)
    return before, before

  last = jax.grad(loss)(end)
  _, earlier = jax.lax.scan(backward, last, (states, number), reverse=True)
  gradients = jnp.concatenate([earlier, last[None]])

  def state_jacobian(at: Any) -> Array:
    state, t = at
    return projected(lambda s: loops.step(s, t)[0], state)

  found = {
    "hidden": jnp.linalg.norm(gradients[..., :width], axis=-1),
    "state": jax.lax.map(state_jacobian, (states, number)),
  }
  if loops.layers is None:
    return found
  h = jax.vmap(lambda s: _latents(s, width))(states)
  found["latents"] = jnp.linalg.norm(gradients[..., width:], axis=-1)

  def gates(at: Any) -> tuple[Array, Array]:
    h, x, t = at
    update = functools.partial(_gated, model.config.gate, loops.layers, t, x)
    jacobian = projected(  # One row per layer and text.
      lambda rows: update(rows.reshape(x.shape))[0].reshape(rows.shape),
      h.reshape(-1, width),
    )
    return update(h)[1], jacobian

  later = jax.tree.map(lambda x: x[1:], (h, inputs, number))
  found["keep"], found["latent"] = jax.lax.map(gates, later)
  return found


def recurrence(model: Any, tokens: Array, count: Array) -> Recurrence:
  """The loops over the last token of each text, after prefill of the others.

  Arguments as in `measure`.
  """
  batch, num_tokens = tokens.shape
  before = jnp.arange(num_tokens)[None] < count[:, None] - 1
  last = jnp.take_along_axis(tokens, count[:, None] - 1, axis=1)
  hidden = model.token_embedding(last)[:, 0]
  module = melt if isinstance(model, melt.Model) else looped
  reading = module.FAMILY.reading
  assert reading is not None
  cache = reading.empty_cache(model, batch, num_tokens)
  _, cache = reading.read(model, tokens, cache, valid=before)
  if module is looped:
    reads = jnp.ones((batch, 1), bool)
    call = causal.begin(model, last, kind="scan", cache=cache, valid=reads)

    def plain(state: Array, t: Array) -> tuple[Array, None]:
      carry = state[:, None], cache
      return model.transform(call, carry, t)[0][:, 0], None

    return Recurrence(hidden, plain, None)
  stack, width = model.stack(), model.config.width
  options = model.pass_options(kind="scan", keep=("inputs",))
  chunk, first = algorithm.begin_on_cache(
    stack, options, cache, hidden[:, None]
  )
  none = first.latents

  def step(state: Array, t: Array) -> tuple[Array, Array]:
    latents = _latents(state, width)[:, :, None].astype(none.dtype)
    before = first._replace(hidden=state[:, None, :width], latents=latents)
    after, records = algorithm.one_loop(stack, options, chunk, before, t)
    inputs = records["inputs"][:, :, 0]
    return _state(after.hidden[:, 0], after.latents[:, :, 0]), inputs

  return Recurrence(_state(hidden, none[:, :, 0]), step, stack.layers)


def _state(hidden: Array, latents: Array) -> Array:
  """The state [B, (1 + L) D] from hidden [B, D] and latents [L, B, D]."""
  rows = jnp.swapaxes(latents, 0, 1).reshape(len(hidden), -1)
  return jnp.concatenate([hidden, rows.astype(hidden.dtype)], axis=1)


def _latents(state: Array, width: int) -> Array:
  """The latents [L, B, D] of a state."""
  rows = state[:, width:].reshape(len(state), -1, width)
  return jnp.swapaxes(rows, 0, 1)


def _gated(
  mode: str, layers: Any, t: Array, x: Array, h: Array
) -> tuple[Array, Array]:
  """(latents after a loop, gate z), both [L, B, D].

  x is fixed, so that the Jacobian has no third term of equation 2; the state's
  Jacobian has it.
  """

  def one(layer: Any, x: Array, h: Array) -> tuple[Array, Array]:
    keep = algorithm.gate_values(layer, mode, t, x[:, None], h[:, None])
    keep = jnp.reshape(keep, (-1, keep.shape[-1] if keep.ndim else 1))
    return reference.interpolate(keep, h, x), jnp.broadcast_to(keep, x.shape)

  return jax.vmap(one)(layers, x.astype(h.dtype), h)


def projected(function: Callable[[Array], Array], at: Array) -> Array:
  """Each row's Jacobian, projected to its dominant invariant subspace.

  Subspace (block power) iteration with vector-Jacobian products. The transpose
  has the same eigenvalues as the Jacobian; Jacobian-vector products are not
  available for attention, which defines its own backward pass.

  Args:
    function: [R, N] -> [R, N], where rows are independent.
    at: where to differentiate, [R, N].

  Returns:
    Q^T J^T Q [R, k, k], whose eigenvalues converge to the largest of J; k <= N.
  """
  num_rows, size = at.shape
  number = min(_NUM_VECTORS, size)
  start = jax.random.normal(jax.random.key(0), (num_rows, size, number))
  _, pull_back = jax.vjp(function, at)
  apply = jax.vmap(lambda v: pull_back(v)[0], in_axes=2, out_axes=2)

  def turn(basis: Array, _: None) -> tuple[Array, None]:
    return jnp.linalg.qr(apply(basis.astype(at.dtype)))[0], None

  basis = jnp.linalg.qr(start)[0]
  basis, _ = jax.lax.scan(turn, basis, length=_NUM_ITERATIONS)
  image = apply(basis.astype(at.dtype))
  return jnp.einsum("rni,rnj->rij", basis, image)


def radius(matrices: np.ndarray) -> np.ndarray:
  """Spectral radii of matrices [..., k, k]."""
  return np.abs(np.linalg.eigvals(np.float64(matrices))).max(axis=-1)
