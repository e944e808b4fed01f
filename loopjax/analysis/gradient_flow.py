"""Gradient flow through the loops of MELT and of looped models.

  python -m loopjax.analysis.gradient_flow runs/melt runs/looped

MELT (arXiv 2605.07721, appendix E) claims that its gate prevents gradients from
vanishing over loops. As in the paper, only the state S_t of a text's last token
is varied; the tokens before it are fixed. S_t is the residual stream after loop
t and, for MELT, the latents of all layers. Writes these means over texts to
gradient_flow.json and draws them:

  gradient   norm of dL/dS_t, where L is the token's loss, for the residual
             stream ("hidden") and the latents; t from 0
  radius     spectral radius of the state Jacobian dS_t/dS_{t-1}
  latent     spectral radius of dh_t/dh_{t-1} with the input x_t fixed, mean
             over layers (equation 2 without its third term)
  gate       z after the first loop: its mean, and the fractions of features
             with z > 0.9 ("kept") and z < 0.1 ("replaced")
"""

import functools
import itertools
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib import ticker

from loopjax import checks
from loopjax.analysis import evaluated
from loopjax.analysis.plots import draw
from loopjax.errors import Parser, UserError, leave, one_line_errors, writing
from loopjax.kernels.gated_kv import reference
from loopjax.losses import tokens as token_losses
from loopjax.models import causal, looped, melt
from loopjax.models.melt import algorithm
from loopjax.run import workdir as workdir_lib
from loopjax.run import zoo
from loopjax.saved import trained
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
  results = jax.device_get(run(tokens, count, targets))
  by_loop = {
    "gradient": {"hidden": results["hidden"].mean(axis=1).tolist()},
    "radius": radius(results["state"]).mean(axis=1).tolist(),
  }
  if "keep" in results:
    keep = results["keep"]  # [K - 1, L, B, D]
    every = (1, 2, 3)
    by_loop["gradient"]["latents"] = results["latents"].mean(axis=1).tolist()
    by_loop["latent"] = radius(results["latent"]).mean(axis=1).tolist()
    by_loop["gate"] = {
      "mean": keep.mean(axis=every).tolist(),
      "kept": (keep > SATURATED).mean(axis=every).tolist(),
      "replaced": (keep < 1 - SATURATED).mean(axis=every).tolist(),
    }
  return {
    "family": "melt" if "keep" in results else "looped",
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

  results = {
    "hidden": jnp.linalg.norm(gradients[..., :width], axis=-1),
    "state": jax.lax.map(state_jacobian, (states, number)),
  }
  if loops.layers is None:
    return results
  h = jax.vmap(lambda s: _latents(s, width))(states)
  results["latents"] = jnp.linalg.norm(gradients[..., width:], axis=-1)

  def gates(at: Any) -> tuple[Array, Array]:
    h, x, t = at
    update = functools.partial(_gated, model.config.gate, loops.layers, t, x)
    jacobian = projected(  # One row per layer and text.
      lambda rows: update(rows.reshape(x.shape))[0].reshape(rows.shape),
      h.reshape(-1, width),
    )
    return update(h)[1], jacobian

  later = jax.tree.map(lambda x: x[1:], (h, inputs, number))
  results["keep"], results["latent"] = jax.lax.map(gates, later)
  return results


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


@one_line_errors
def main(argv: Sequence[str] | None = None) -> int:
  """Measures runs and draws a figure of them; returns the exit status."""
  parser = Parser(
    prog="python -m loopjax.analysis.gradient_flow",
    description="Gradients and Jacobians of the loops of MELT and LoopLM.",
  )
  parser.add_argument(
    "workdirs", type=pathlib.Path, nargs="+", metavar="RUN", help="runs"
  )
  parser.add_argument(
    "--out",
    type=pathlib.Path,
    help="where to write [analysis in the first RUN]",
  )
  parser.add_argument(
    "--texts", type=int, default=32, help="number of test texts [32]"
  )
  options = parser.parse_args(argv)
  checks.flags_at_least(options, texts=1)
  results = {
    path.as_posix(): of_run(path, options.texts) for path in options.workdirs
  }
  output = options.out or zoo.output(options.workdirs[0]) / "analysis"
  with writing(f"--out={output}"):
    output.mkdir(parents=True, exist_ok=True)
    files = write(results, output)
  for path in files:
    print(path)
  return 0


def of_run(workdir: pathlib.Path, num_texts: int) -> dict[str, Any]:
  """The measurements of a run, on texts of its test split.

  Raises:
    UserError: there is no run, or it has another family.
  """
  run = trained.read(workdir)
  settings = run.settings
  if not isinstance(settings.model, looped.Config | melt.Config):
    name = settings.model_name
    raise UserError(f"{workdir}: model.name={name!r} is not looped or melt")
  dataset = settings.task_module.make_dataset(
    settings.task, "test", batch_size=settings.eval.batch_size, seed=0
  )
  batch = evaluated.sample(dataset, num_texts)
  return measure(run.model(), *texts_of(batch, settings.spec))


def texts_of(batch: Mapping[str, np.ndarray], spec: Any) -> tuple[Any, ...]:
  """The arguments of `measure`: the first document of every row.

  Rows whose first document has fewer than two tokens are skipped.
  """
  count = evaluated.first_document(batch, spec.num_tokens).sum(axis=1)
  rows = np.flatnonzero(count > 1)
  if not len(rows):
    raise UserError("the test split has no text of at least two tokens")
  # Followed by padding and later documents.
  last = batch["targets"][rows, count[rows] - 1]
  return batch["inputs"][rows], count[rows], last


def write(
  results: Mapping[str, Mapping[str, Any]], directory: pathlib.Path
) -> list[pathlib.Path]:
  """Writes gradient_flow.json and gradient_flow.png; returns their paths."""
  numbers = directory / "gradient_flow.json"
  workdir_lib.write_json(numbers, results)
  figure = draw.new(12, 3.8)
  back, forth, gates = figure.subplots(1, 3)
  names = [pathlib.Path(path).name for path in results]
  for color, (path, one) in zip(itertools.cycle(draw.PALETTE), results.items()):
    name = pathlib.Path(path).name
    name = name if names.count(name) == 1 else path
    for part, style in (("hidden", "-"), ("latents", "--")):
      if norms := one["gradient"].get(part):
        label = name if part == "hidden" else f"{name}, latents"
        back.plot(norms, style, color=color, marker="o", ms=4, label=label)
    loops = 1 + np.arange(len(one["radius"]))
    forth.plot(loops, one["radius"], color=color, marker="o", ms=4, label=name)
    if "gate" in one:
      label = f"{name}, latent only"
      forth.plot(loops[1:], one["latent"], "--", color=color, label=label)
      for part, style in (("mean", "-"), ("kept", ":"), ("replaced", "--")):
        label = _GATES[part]
        gates.plot(
          loops[1:], one["gate"][part], style, color=color, label=label
        )
  forth.axhline(1, color=draw.GREY, linestyle=":")
  back.set_yscale("log")
  draw.tidy(back, "Gradient norm at the state", "after loop", "norm")
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


if __name__ == "__main__":
  leave(main())
