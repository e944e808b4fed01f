"""Gradient flow through the loops of MELT and of looped models.

  python -m loopjax.analysis.gradient_flow runs/melt runs/looped

MELT (arXiv 2605.07721, appendix E) claims that its gate prevents gradients from
vanishing over loops. As in the paper, only the state S_t of a text's last token
is varied, see `jacobians`. Writes these means over texts to gradient_flow.json
and draws them:

  gradient   norm of dL/dS_t, where L is the token's loss, for the residual
             stream ("hidden") and the latents; t from 0
  radius     spectral radius of the state Jacobian dS_t/dS_{t-1}
  latent     spectral radius of dh_t/dh_{t-1} with the input x_t fixed, mean
             over layers (equation 2 without its third term)
  gate       z after the first loop: its mean, and the fractions of features
             with z > 0.9 ("kept") and z < 0.1 ("replaced")
"""

import itertools
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib import ticker

from loopjax.analysis import evaluated, jacobians, prompts
from loopjax.analysis.plots import draw
from loopjax.errors import Parser, UserError, leave, one_line_errors, writing
from loopjax.models import looped, melt
from loopjax.run import workdir as workdir_lib
from loopjax.run import zoo
from loopjax.saved import trained


@one_line_errors
def main(argv: Sequence[str] | None = None) -> int:
  """Measures runs and draws a figure of them; returns the exit status."""
  parser = Parser(
    prog="python -m loopjax.analysis.gradient_flow",
    description="Gradients and Jacobians of the loops of MELT and LoopLM.",
  )
  parser.add_argument(
    "workdirs", type=pathlib.Path, nargs="+", metavar="WORKDIR", help="runs"
  )
  parser.add_argument(
    "--out",
    type=pathlib.Path,
    help="where to write [analysis in the first WORKDIR]",
  )
  parser.add_argument(
    "--texts", type=int, default=32, help="number of test texts [32]"
  )
  options = parser.parse_args(argv)
  if options.texts < 1:
    raise UserError(f"--texts={options.texts} must be at least 1")
  found = {
    path.as_posix(): of_run(path, options.texts) for path in options.workdirs
  }
  output = options.out or zoo.output(options.workdirs[0]) / "analysis"
  with writing(f"--out={output}"):
    output.mkdir(parents=True, exist_ok=True)
    files = write(found, output)
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
  return jacobians.measure(run.model(), *texts_of(batch, settings.spec))


def texts_of(batch: Mapping[str, np.ndarray], spec: Any) -> tuple[Any, ...]:
  """The arguments of `jacobians.measure`: the first document of every row.

  Rows whose first document has fewer than two tokens are skipped.
  """
  num_tokens = spec.vocab_size - spec.num_padding_tokens
  count = prompts.first_document(batch, num_tokens).sum(axis=1)
  rows = np.flatnonzero(count > 1)
  if not len(rows):
    raise UserError("the test split has no text of at least two tokens")
  # Followed by padding and later documents.
  last = batch["targets"][rows, count[rows] - 1]
  return batch["inputs"][rows], count[rows], last


def write(
  found: Mapping[str, Mapping[str, Any]], directory: pathlib.Path
) -> list[pathlib.Path]:
  """Writes gradient_flow.json and gradient_flow.png; returns their paths."""
  numbers = directory / "gradient_flow.json"
  workdir_lib.write_json(numbers, found)
  figure = draw.new(12, 3.8)
  back, forth, gates = figure.subplots(1, 3)
  names = [pathlib.Path(path).name for path in found]
  for color, (path, one) in zip(itertools.cycle(draw.PALETTE), found.items()):
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
  "kept": f"share of z > {jacobians.SATURATED:g}",
  "replaced": f"share of z < {1 - jacobians.SATURATED:.1f}",
}


if __name__ == "__main__":
  leave(main())
