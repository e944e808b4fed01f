# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # loopjax from Python, in ten cells
#
# Load a trained looped model and look into its loops; build one, train it on
# your own text, score, save and use it; compare numbers of loops. The same
# functions as in `docs/library.md`, which explains their arguments.

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
# ## A trained model
#
# This model writes down running sums. Each token passes through the same layers
# four times.

# %%
import loopjax

sums = loopjax.load("zoo:sums_melt")
print(sums)
print(sums.generate("3+4+8+2+1+1+5+9=", max_new_tokens=24, temperature=0.0))

# %% [markdown]
# ## What it predicts after each loop
#
# Another of the trained models fills a 6x6 Sudoku. `logits` and `trace` take
# token ids and any number of loops.

# %%
import numpy as np

puzzles = loopjax.load("zoo:sudoku_6x6")
data = loopjax.datasets("sudoku", batch_size=64, box_rows=2, box_cols=3)
board, loops = data["test"][0], 2 if SMOKE else 24
guesses = puzzles.trace(board["inputs"], "prediction", num_loops=loops)
right = (guesses["prediction"] == board["targets"]).all(axis=2).mean(axis=1)
last = puzzles.logits(board["inputs"], num_loops=loops).argmax(axis=-1)
assert (last == guesses["prediction"][-1]).mean() > 0.99

# %%
from loopjax.analysis.plots import draw

figure = draw.new(6, 3.2)
axes = figure.subplots()
axes.plot(np.arange(1, loops + 1), right, color=draw.BLUE, marker="o")
draw.tidy(axes, "64 puzzles of 6x6", "loops", "solved completely")
RUNS.mkdir(parents=True, exist_ok=True)
draw.save(figure, RUNS / "solved.png")

from IPython.display import Image, display

display(Image(filename=RUNS / "solved.png"))

# %% [markdown]
# ## Your own text
#
# The text here is the pages of the documentation; any files will do. `fit`
# trains with the optimizer of the settings, or with one of Optax (`tx`).

# %%
size = {"sequence_length": 64, "train_files": "docs/*.md"}
text = loopjax.datasets("text", batch_size=8, **size)
m = loopjax.build(
  "looped", width=16 if SMOKE else 128, num_heads=4, num_layers=2, num_loops=3,
  task__sequence_length=64,
)  # fmt: skip
m = m.fit(
  text["train"], steps=2 if SMOKE else 300, quiet=True,
  on_log=lambda step, metrics, m: print(step, metrics["loss"]),
)  # fmt: skip
print(m.evaluate(text["test"][:8])["bits_per_byte"], "bits per byte")

# %% [markdown]
# ## Save it
#
# Every command reads the folder: `loopjax serve runs/notebooks/mine` answers
# over HTTP, `loopjax play` shows each token loop by loop.

# %%
import shutil

shutil.rmtree(RUNS / "mine", ignore_errors=True)
loopjax.save(m, RUNS / "mine")
again = loopjax.load(RUNS / "mine")
print(again.generate("The model", max_new_tokens=40, temperature=0.0))

# %% [markdown]
# ## A training loop of your own
#
# A model is a pytree of its parameters: `loopjax.loss` has a gradient, which is
# a model too, and Optax updates it. (Each step has another batch, and with it
# another loss.)

# %%
import jax
import optax

tx = optax.adam(1e-3)
gradient = jax.jit(jax.value_and_grad(loopjax.loss, has_aux=True))
mine, state = m, tx.init(m)
for step in range(3):
  (loss, metrics), grads = gradient(mine, text["train"][step])
  updates, state = tx.update(grads, state, mine)
  mine = optax.apply_updates(mine, updates)
  print(step, float(loss))

# %% [markdown]
# ## Seeds at once
#
# The losses of three initial models, in one compiled program.


# %%
def initial_loss(seed):
  model = loopjax.build("looped", seed=seed, width=32, num_heads=4)
  return loopjax.loss(model, np.ones((2, 64), int), np.ones((2, 64), int))[0]


print(jax.vmap(initial_loss)(np.arange(3)))

# %% [markdown]
# ## Many runs
#
# `run_sweep` trains one run per item and seed of a config, with checkpoints,
# and returns their scores; `table` returns the scores of any runs.

# %%
import contextlib
import io

said = io.StringIO()  # The progress of each run.
with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
  loopjax.run_sweep(
    "configs/lm_looped.py:smoke",
    [{"model.num_loops": 1}, {"model.num_loops": 2}],
    workdir=RUNS / "loops",
  )

# %% [markdown]
# `pandas.DataFrame` takes these rows.

# %%
for row in loopjax.table(RUNS / "loops", "test/loss", rows="model.num_loops"):
  print(row)
