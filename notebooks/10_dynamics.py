# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # What does your loop do?
#
# A looped model is a map that is applied again and again. Does its state come
# to rest? Would more loops help? Here are three trained models that come with
# the package; `loopjax dynamics RUN` says the same of yours.
#
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
# ## Puzzles: at rest, because cells halt
#
# 64 loops of a model that was trained with 16, on 9x9 Sudokus of its test
# split.

# %%
import jax.numpy as jnp
import numpy as np
from IPython.display import display
from PIL import Image

import loopjax
from loopjax.analysis.plots import draw

NUM = 6 if SMOKE else 64
RUNS.mkdir(parents=True, exist_ok=True)


def shown(path):
  picture = Image.open(path).convert("RGB")
  width, height = picture.size
  smaller = picture.resize((width * 2 // 3, height * 2 // 3))
  return smaller.quantize(100, Image.Quantize.MAXCOVERAGE)


# %%
nine = loopjax.load("zoo:sudoku_nine")
puzzles = loopjax.datasets(nine, batch_size=NUM)["test"][0]
d = loopjax.dynamics(nine, puzzles, num_loops=NUM)
print("\n".join(d.lines()))
display(shown(d.draw(RUNS / "dynamics_nine.png")))

# %% [markdown]
# Every state settles, right or wrong: in UTM, a token that has halted does not
# move any more. The Jacobian is of a loop in which no token has halted. Its
# spectral radius is far above 1, so the loop itself would move the state away;
# halting holds it.
#
# ## An attractor: a network without halting in its state
#
# URM, on 6x6 puzzles. A loop is a segment of supervision, after each of which
# training asked for the answer.

# %%
urm = loopjax.load("zoo:sudoku_urm")
small = loopjax.datasets(urm, batch_size=NUM)["test"][0]
d = loopjax.dynamics(urm, small, num_loops=NUM)
print("\n".join(d.lines()))
display(shown(d.draw(RUNS / "dynamics_urm.png")))

# %% [markdown]
# Nearly all states settle to the last bit, in the right answer, and the
# spectral radius is below 1. The others circle around it without a change of
# the answer. Another puzzle's state at one position changes little.
#
# ## A language model: more loops do harm
#
# A LoopLM of four loops, on rows of the licence of this package.

# %%
novels = loopjax.load("zoo:novels")
text = np.frombuffer(pathlib.Path("LICENSE").read_bytes(), np.uint8)[:1025]
rows = text[:-1].reshape(8, 128), text[1:].reshape(8, 128)
d = loopjax.dynamics(novels, rows, num_loops=NUM)
print("\n".join(d.lines()))
display(shown(d.draw(RUNS / "dynamics_novels.png")))

# %% [markdown]
# The loss is lowest after the loops of training. The state still changes by
# some percent after 64, and the spectral radius is above 1.
#
# ## Edits: what does a state carry?
#
# After one loop, each 9x9 puzzle continues with the state of the next puzzle.
# UTM reads its input only before the first loop. Which puzzle does it solve?

# %%
LOOPS = 4 if SMOKE else 16
states = nine.trace(puzzles["inputs"], "state", num_loops=LOOPS)
states = states["state"]["hidden"]


def swapped_after(loop):
  other = jnp.roll(states[loop], 1, axis=0)
  return lambda state, k: {
    "hidden": jnp.where(k == loop, other, state["hidden"])
  }


# %%
own, others = [], []
for loop in range(0, LOOPS, 2):
  logits = nine.logits(
    puzzles["inputs"], num_loops=LOOPS, edit=swapped_after(loop)
  )
  answer = np.argmax(logits, axis=-1)
  own.append(np.mean(answer == puzzles["targets"]))
  others.append(np.mean(answer == np.roll(puzzles["targets"], 1, axis=0)))

figure = draw.new(6, 3.6)
axes = figure.subplots()
axes.plot(range(1, LOOPS + 1, 2), own, label="its own solution")
axes.plot(range(1, LOOPS + 1, 2), others, label="the other puzzle's")
draw.tidy(axes, "Cells of the answer", "loop after which states swap", "share")
axes.legend(frameon=False)
display(shown(draw.save(figure, RUNS / "dynamics_swapped.png")))

# %% [markdown]
# Swapped after the first loop, the answer is nearly always the other puzzle's.
# Later it is a mixture: the answer of UTM is a sum over loops, weighted by the
# router, and the loops before the swap, and which cells have halted, stay.
#
# For your own model: `loopjax dynamics RUN`, or the calls above
# (`docs/dynamics.md`).
