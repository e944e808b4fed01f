"""What loops pass on and back: MELT beside a plain recurrence.

  python -m loopjax.analysis.gradient_flow runs/melt runs/looped

MELT (arXiv 2605.07721, appendix E) claims that its gate keeps gradients alive
over loops. As there, only the state of one token is looked at, the last of a
text, with those before it fixed. The state S_t after loop t is the residual
stream, and in MELT the latents of all layers beside it. Written to
gradient_flow.json and drawn, means over texts:

  gradient   norm of dL/dS_t, L being the token's loss, of the residual stream
             and of the latents; t from 0
  radius     spectral radius of dS_t/dS_{t-1}, the state Jacobian
  latent     that of dh_t/dh_{t-1} with the input x_t fixed, mean over layers
             (equation 2 without its third term)
  gate       z after the first loop: its mean, and the shares of features that
             keep over 0.9 of the latent, or under 0.1
"""

import functools
import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib import ticker

from loopjax import trained
from loopjax.analysis import draw, evaluated
from loopjax.errors import Parser, UserError
from loopjax.losses import tokens as token_losses
from loopjax.models import causal, looped, melt
from loopjax.models.melt import layer as layer_lib
from loopjax.models.melt import reading as melt_reading
from loopjax.run import workdir as workdir_lib
from loopjax.types import Array

SATURATED = 0.9
_NUM_VECTORS, _NUM_ITERATIONS = 8, 50  # Of the subspace iteration.


class Recurrence(NamedTuple):
  """The loops over one token of each of B texts.

  Attributes:
    start: S_0 [B, N]; the first D numbers are the residual stream.
    step: (S_{t-1}, t - 1) -> (S_t, what the layers read in the loop [L, B, D],
      or None).
    layers: of MELT, with its gates; None for a plain recurrence.
  """

  start: Array
  step: Callable[[Array, Array], tuple[Array, Any]]
  layers: Any


def main(argv: Sequence[str] | None = None) -> int:
  """Measures runs and draws them beside each other; returns the exit status."""
  parser = Parser(
    prog="python -m loopjax.analysis.gradient_flow",
    description="Gradients and Jacobians of the loops of MELT and LoopLM.",
  )
  parser.add_argument("workdir", type=pathlib.Path, nargs="+", help="of runs")
  parser.add_argument(
    "--output", type=pathlib.Path, help="directory [analysis, in the first]"
  )
  parser.add_argument("--texts", type=int, default=32, help="to look at [32]")
  try:
    options = parser.parse_args(argv)
    if options.texts < 1:
      raise UserError(f"--texts={options.texts} must be at least 1")
    found = {
      path.as_posix(): of_run(path, options.texts) for path in options.workdir
    }
    output = options.output or options.workdir[0] / "analysis"
    try:
      output.mkdir(parents=True, exist_ok=True)
      files = write(found, output)
    except OSError as error:
      raise UserError(f"--output={output}: {error.strerror}") from error
  except UserError as error:
    print(f"error: {error}", file=sys.stderr)
    return 2
  for path in files:
    print(path)
  return 0


def of_run(workdir: pathlib.Path, num_texts: int) -> dict[str, Any]:
  """The numbers of a run, on texts of its test split.

  Raises:
    UserError: there is no run, or it is of another family.
  """
  run = trained.read(workdir)
  settings = run.settings
  if not isinstance(settings.model, looped.Config | melt.Config):
    name = settings.plain["model"]["name"]
    raise UserError(f"{workdir}: model.name={name!r} is not looped or melt")
  dataset = settings.task_module.make_dataset(
    settings.task, "test", batch_size=settings.eval.batch_size, seed=0
  )
  batch = evaluated.sample(dataset, num_texts)
  return measure(run.model(), *texts_of(batch, settings.spec))


def texts_of(batch: Mapping[str, np.ndarray], spec: Any) -> tuple[Any, ...]:
  """Tokens [B, T], the number of each row's first document [B], and targets.

  Rows of fewer than two tokens are left out; each row's target is that of its
  last token, i32 [B].
  """
  there = batch["inputs"] < spec.vocab_size - spec.num_padding_tokens
  if "documents" in batch:
    there &= batch["documents"] == batch["documents"][:, :1]
  count = there.sum(axis=1)
  rows = np.flatnonzero(count > 1)
  if not len(rows):
    raise UserError("the test split has no text of two tokens")
  # Padding and later documents come after.
  last = batch["targets"][rows, count[rows] - 1]
  return batch["inputs"][rows], count[rows], last


def measure(
  model: Any, tokens: Array, count: Array, targets: Array
) -> dict[str, Any]:
  """The numbers of the module's docstring, by loop.

  Args:
    model: of the family looped or melt.
    tokens: [B, T]. count: tokens of each text, at least 2, i32 [B].
    targets: of the last ones, i32 [B].
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
  """Of each text, and of MELT of each layer: norms, Jacobians and gates."""
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
    jacobian = projected(  # A row for every layer of every text.
      lambda rows: update(rows.reshape(x.shape))[0].reshape(rows.shape),
      h.reshape(-1, width),
    )
    return update(h)[1], jacobian

  later = jax.tree.map(lambda x: x[1:], (h, inputs, number))
  found["keep"], found["latent"] = jax.lax.map(gates, later)
  return found


def recurrence(model: Any, tokens: Array, count: Array) -> Recurrence:
  """The loops over the last token of each text, after reading the others."""
  batch, num_tokens = tokens.shape
  before = jnp.arange(num_tokens)[None] < count[:, None] - 1
  last = jnp.take_along_axis(tokens, count[:, None] - 1, axis=1)
  hidden = model.token_embedding(last)[:, 0]
  family: Any = melt if isinstance(model, melt.Model) else looped
  cache = family.empty_cache(model, batch, num_tokens)
  _, cache = family.read(model, tokens, cache, valid=before)
  if family is looped:
    there = jnp.ones((batch, 1), bool)
    call = causal.begin(model, last, kind="scan", cache=cache, valid=there)

    def plain(state: Array, t: Array) -> tuple[Array, None]:
      carry = state[:, None], cache
      return model.transform(call, carry, t)[0][:, 0], None

    return Recurrence(hidden, plain, None)
  one_loop = melt_reading.make_loop(model, 1, cache)
  live, width = jnp.ones(batch, bool), model.config.width
  none = melt_reading.empty_latents(model, (batch, 1))

  def step(state: Array, t: Array) -> tuple[Array, Array]:
    latents = _latents(state, width)[:, :, None].astype(none.dtype)
    hidden, (latents, _), inputs = one_loop(
      state[:, None, :width], (latents, (cache.key, cache.value)), t, live
    )
    return _state(hidden[:, 0], latents[:, :, 0]), inputs[:, :, 0]

  return Recurrence(_state(hidden, none[:, :, 0]), step, model.stack().layers)


def _state(hidden: Array, latents: Array) -> Array:
  """[B, D] and [L, B, D] as [B, (1 + L) D]."""
  rows = jnp.swapaxes(latents, 0, 1).reshape(len(hidden), -1)
  return jnp.concatenate([hidden, rows.astype(hidden.dtype)], axis=1)


def _latents(state: Array, width: int) -> Array:
  """The latents [L, B, D] of a state."""
  rows = state[:, width:].reshape(len(state), -1, width)
  return jnp.swapaxes(rows, 0, 1)


def _gated(
  mode: str, layers: Any, t: Array, x: Array, h: Array
) -> tuple[Array, Array]:
  """The latents after a loop, and z, both [L, B, D]."""

  def one(layer: Any, x: Array, h: Array) -> tuple[Array, Array]:
    keep = layer_lib.gate_values(layer, mode, t, x[:, None], h[:, None])
    keep = jnp.reshape(keep, (-1, keep.shape[-1] if keep.ndim else 1))
    return x + keep * (h - x), jnp.broadcast_to(keep, x.shape)

  return jax.vmap(one)(layers, x.astype(h.dtype), h)


def projected(function: Callable[[Array], Array], at: Array) -> Array:
  """The Jacobian of each row where it is largest, for its spectral radius.

  Subspace (block power) iteration with products of vectors and the Jacobian,
  whose transpose has the same eigenvalues; attention has no others.

  Args:
    function: [R, N] -> [R, N], row by row.
    at: [R, N].

  Returns:
    Q^T J^T Q [R, k, k], whose eigenvalues tend to J's largest; k <= N.
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
  """Spectral radius of [..., k, k]."""
  return np.abs(np.linalg.eigvals(np.float64(matrices))).max(axis=-1)


def write(
  found: Mapping[str, Mapping[str, Any]], directory: pathlib.Path
) -> list[pathlib.Path]:
  """gradient_flow.json and .png."""
  numbers = directory / "gradient_flow.json"
  workdir_lib.write_json(numbers, found)
  figure = draw.new(12, 3.8)
  back, forth, gates = figure.subplots(1, 3)
  for color, (path, one) in zip(_colors(found), found.items(), strict=True):
    name = pathlib.Path(path).name
    for part, style in (("hidden", "-"), ("latents", "--")):
      if norms := one["gradient"].get(part):
        label = name if part == "hidden" else f"{name}, latents"
        back.plot(norms, style, color=color, marker="o", ms=4, label=label)
    loops = 1 + np.arange(len(one["radius"]))
    forth.plot(loops, one["radius"], color=color, marker="o", ms=4, label=name)
    if "gate" in one:
      label = f"{name}, latent alone"
      forth.plot(loops[1:], one["latent"], "--", color=color, label=label)
      for part, style in (("mean", "-"), ("kept", ":"), ("replaced", "--")):
        label = _GATES[part]
        gates.plot(
          loops[1:], one["gate"][part], style, color=color, label=label
        )
  forth.axhline(1, color=draw.GREY, linestyle=":")
  back.set_yscale("log")
  draw.tidy(back, "Gradient that reaches the state", "after loop", "norm")
  draw.tidy(forth, "Spectral radius of a loop", "loop", "radius")
  draw.tidy(gates, "Gates", "loop", "")
  gates.set_ylim(0, 1)
  for axes in (back, forth, gates):
    axes.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
    if axes.get_legend_handles_labels()[0]:
      axes.legend(frameon=False, fontsize=8)
  return [numbers, draw.save(figure, directory / "gradient_flow.png")]


_GATES = {
  "mean": "mean z",
  "kept": f"share of z > {SATURATED:g}",
  "replaced": f"share of z < {1 - SATURATED:.1f}",
}


def _colors(found: Mapping[str, Any]) -> list[str]:
  return [draw.PALETTE[i % len(draw.PALETTE)] for i in range(len(found))]


if __name__ == "__main__":
  sys.exit(main())
