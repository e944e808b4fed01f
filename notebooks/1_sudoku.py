# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # A Sudoku, solved loop by loop
#
# The universal transformer with memory tokens (UTM; G. Sapunov, arXiv
# 2604.21999) is *one* transformer block, applied $K$ times to all cells of a
# board at once, with $M$ learned memory tokens beside them (section 2.1). After
# loop $k$ a router computes from each token's state $g_k$
#
# $$p_k = \sigma(w^\top g_k + b),$$
#
# and a token stops once its $p_k$ sum to $1 - \epsilon$: adaptive computation
# time, ACT. Its prediction is read out from $\sum_k w_k\, g_k$. The weights are
# $w_k = p_k$, except at its last loop, whose weight is the remainder (section
# 2.2). The router's bias starts at $-3$, which makes tokens use many loops at
# first: the paper's deep start.
#
# In the code this is `Model.__call__` in `loopjax/models/utm/model.py` and
# `halting.ACT` in `loopjax/loop/halting.py`.

# %%
# Finds the repository; on Colab, fetches and installs it first.
import os
import pathlib
import runpy
import subprocess
import sys

here = pathlib.Path.cwd()
if "google.colab" in sys.modules:
  here = pathlib.Path("/content/loopjax")
  if not here.exists():
    url = "https://github.com/OWNER/loopjax"
    subprocess.run(["git", "clone", "-q", url, here], check=True)
found = [p for p in (here, *here.parents) if (p / "configs").is_dir()]
assert found, "open this notebook in a clone of the repository"
os.chdir(found[0])
runpy.run_path("notebooks/start.py", run_name="__main__")
# The tests set this to a folder: runs are then tiny, and are written there.
SMOKE = os.environ.get("LOOPJAX_SMOKE", "")
RUNS = pathlib.Path(SMOKE or "runs/notebooks")

# %% [markdown]
# ## Train
#
# `configs/sudoku_utm.py` is the experiment: model, data, optimizer and steps.
# The part after the colon on the command line is the argument here. The preset
# `tiny` has 6x6 boards and 51,545 parameters; here, about half of its steps are
# enough. `train.run` is what `loopjax train --config=configs/sudoku_utm.py`
# calls. If you run the cell again, it reports that the run is complete, or
# resumes an interrupted run.

# %%
from loopjax import train
from loopjax.config import presets

get_config = presets.read("configs/sudoku_utm.py")["get_config"]
steps = "run.num_steps=1400,run.checkpoint_every=700,run.log_every=200"
config = get_config("smoke" if SMOKE else f"tiny,{steps}")
workdir = RUNS / "sudoku"
summary = train.run(config, workdir, "train")
print(f"{summary['parameters']:,} parameters, {summary['wall_seconds']:.0f} s")

# %% [markdown]
# ## Look at unseen puzzles
#
# `trained.read` loads a run's last checkpoint. An `EvaluatedModel` is the model
# with its outputs on part of the test split; all figures are drawn from one.
# This figure shows a hard puzzle that the model solves: its answer after some
# of the loops, in stronger colours where it is more certain, and then the
# output, which is read out from the weighted sum.

# %%
from IPython.display import display
from PIL import Image

from loopjax.saved import trained
from loopjax.analysis import sudoku
from loopjax.analysis import evaluated as evaluated_lib
from loopjax.run import workdir as workdir_lib

run = trained.read(workdir)
settings = run.settings
test = settings.task_module.make_dataset(
  settings.task, "test", batch_size=settings.eval.batch_size, seed=0
)
evaluated = evaluated_lib.evaluate_model(
  settings, run.graphdef, run.params, test,
  workdir_lib.read_metrics(workdir), workdir / "figures",
)  # fmt: skip


# %%
def show(files):  # Few colours keep the notebook small.
  display(*(Image.open(f).convert("RGB").quantize(200) for f in files))


show(sudoku.draw_solved(evaluated))

# %% [markdown]
# ## More loops than it was trained with
#
# A looped model is not limited to its training depth. The score after every
# loop, up to four times the trained number (section 5.2, figure 7), shows how
# many loops it needs, and whether more of them do harm.

# %%
from loopjax.analysis import depth

scores = depth.scores_by_depth(evaluated)
headline, loops = settings.task_module.HEADLINE, settings.model.num_loops
examples = min(settings.eval.depth_examples, len(evaluated.batch["inputs"]))
show(depth.draw_depth(scores, headline, loops, examples, evaluated.directory))

# %% [markdown]
# ## When does a cell stop?
#
# Left: mean over puzzles; right: the puzzle above. Do the given digits, which
# only have to be copied, stop earlier?

# %%
show(sudoku.draw_halting_map(evaluated))

# %% [markdown]
# They do: a given digit stops after a few loops, and the blanks of a hard
# puzzle run on. The preset has a small penalty on loops
# (`model.ponder_weight`); without it, every cell runs all twelve.
# `ponder_steps`, printed in training, is the mean over cells and memory tokens.
#
# ## Your own puzzle
#
# Enter one, with `.` for a blank. `make_forward` compiles a forward pass that
# records the requested traces in every loop: here each loop's prediction, and
# the weight $w_k$ of each token, memory tokens first. A puzzle's tokens are its
# digits plus one; a blank is 1. Uncertain digits, with a probability below one
# half, are shown as `·`.

# %%
import numpy as np

board = settings.task.board
given = evaluated.batch["inputs"][sudoku.choose(evaluated)[0]] - 1
puzzle = "".join(str(digit) if digit else "." for digit in given)
# puzzle = "..." for your own: row by row, one character per cell.

cells = [1 if c == "." else int(c) + 1 for c in puzzle]
tokens = np.array([cells], np.int32)
forward = evaluated_lib.make_forward(
  settings, run.graphdef, run.params, {"inputs": tokens}
)
output = forward(("prediction", "confidence", "weight"))


# %%
def lines(digits, certain):
  shown = np.where(certain, digits.astype(str), "·")
  return [" ".join(row) for row in shown.reshape(board.size, board.size)]


prediction, confidence = output.trace["prediction"], output.trace["confidence"]
loops = np.unique(np.linspace(0, len(prediction) - 1, 5).astype(int))
panels = [lines(tokens[0] - 1, tokens[0] > 1)]
panels += [lines(prediction[k, 0] - 1, confidence[k, 0] > 0.5) for k in loops]
titles = ["puzzle", *(f"loop {k + 1}" for k in loops)]
print("    ".join(title.ljust(len(panels[0][0])) for title in titles))
for row in zip(*panels, strict=True):
  print("    ".join(row))

# %% [markdown]
# ## A larger board, without training
#
# The package includes trained models: use `zoo:NAME` in place of a run's
# directory (`loopjax zoo list`). This one was trained on 9x9 boards
# for 34 minutes; `loopjax play zoo:sudoku_nine` shows the same in the browser.
# How many blanks of a hard puzzle are correct after each loop?

# %%
from loopjax.play import load

inspector = load.load(pathlib.Path("zoo:sudoku_nine"), 2 if SMOKE else None)
found = inspector.random(0, "hard")
blanks = [i for i, digit in enumerate(found["prompt"]) if digit == "."]
print(f"{len(blanks)} blanks, {found['guesses']} guesses needed")
for k, digits in enumerate(found["digits"][:-1]):
  right = sum(digits[i] == int(found["solution"][i]) for i in blanks)
  print(f"loop {k + 1:2}  {'#' * right}{'.' * (len(blanks) - right)} {right}")

# %% [markdown]
# ## Next steps
#
# * 9x9: `--config=configs/sudoku_utm.py:nine`, half an hour to an hour on a
#   core; `:paper` is the paper's scale and data.
# * Do memory tokens matter? `loopjax sweep
#   --config=configs/sudoku_utm.py --sweep=memory_curve`, then `loopjax report`
#   on its folder, shows our numbers beside the paper's Table 3.
# * Another halting rule: [notebook 7](7_your_own.ipynb).
