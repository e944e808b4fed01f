# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Sleep: fast weights take over an evicted window
#
# *Language Models Need Sleep* (arXiv 2605.26099): a model processes a long text
# window by window, and attention sees only the current window. Before a window
# is evicted, the model *sleeps*: it passes over the window $N$ times,
#
# $$h, S \leftarrow \mathrm{Blocks}(h, S) \qquad \text{(algorithm 1)},$$
#
# and in every pass its memory layers write to their fast weights $S$ by the
# gated delta rule. Afterwards the keys and values are gone; only $S$ remains of
# the window. The answer is computed in one pass.
#
# Here the window is the state of a cellular automaton, and the question is the
# value of a cell some steps later (section 6.1). More passes can compute more
# of it *before* the window is evicted.

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
# ## Train with four passes
#
# Rule 110: two states of 12 cells, each in its own window; the question is the
# first cell of each, four steps later. 16,148 parameters.

# %%
from loopjax import train
from loopjax.config import presets

get_config = presets.read("configs/automaton_sleep.py")["get_config"]
small = "tiny,task.num_steps=4,run.num_steps=700,run.checkpoint_every=700"
config = get_config("smoke" if SMOKE else small)
workdir = RUNS / "sleep"
summary = train.run(config, workdir, "train")
print(f"{summary['parameters']:,} parameters, {summary['wall_seconds']:.0f} s")

# %% [markdown]
# ## Step by step
#
# These are the parts of `Model.__call__`: `sleep` over each window, then
# `awake` over the answer's tokens. Windows affect the answer only through
# `kept`, which contains only fast weights: with `eviction="hard"` no keys or
# values survive.

# %%
import functools

import jax
import numpy as np
from flax import nnx

from loopjax.saved import trained

run = trained.read(workdir)
settings = run.settings
length, answer = settings.model.window, settings.spec.num_answer_tokens
test = settings.task_module.make_dataset(
  settings.task, "test", batch_size=512, seed=0
)
batch = test.batches[0]
inputs, targets = batch["inputs"], batch["targets"][:, -answer:]


# %%
@functools.partial(jax.jit, static_argnames="num_passes")
def sleep(params, inputs, num_passes):
  """The state kept after each window."""
  model = nnx.merge(run.graphdef, params)
  kept = model.empty_state(
    len(inputs), num_past=model.config.num_past, carry_convolutions=False
  )
  after = []
  for start in range(0, inputs.shape[1] - answer, length):
    window = model.embed(inputs[:, start : start + length])
    kept, _ = model.sleep(kept, window, num_passes, "scan")
    after.append(kept)
  return after


# %%
@jax.jit
def read(params, kept, inputs):
  """Logits of the answer, from the fast weights alone."""
  model = nnx.merge(run.graphdef, params)
  hidden, _ = model.awake(kept, model.embed(inputs[:, -answer:]))
  return model.logits(hidden)


passes = settings.model.num_loops
kept = sleep(run.params, inputs, passes)[-1]
logits = read(run.params, kept, inputs)
np.testing.assert_allclose(logits, run.model()(inputs).logits, atol=1e-4)
sizes = [x.size for x in jax.tree.leaves(kept.parts[1].past)]
print(f"numbers kept as keys and values: {sum(sizes)}")
fast = kept.parts[1].state.fast  # [groups, layers, B, H, d_k, d_v]
print(f"numbers in fast weights, per example: {fast[:, :, 0].size}")


# %% [markdown]
# ## How many passes does it need?
#
# We use the same parameters with fewer or more passes than in training. The
# numbers are the fraction of examples with both cells correct; "constant" is
# the best answer that ignores the input.


# %%
def right(logits):
  return np.mean(np.all(logits.argmax(-1) == targets, axis=1))


print(f"constant: {test.facts['constant_floor']:.3f}")
for n in range(1, passes + 3):
  kept = sleep(run.params, inputs, n)[-1]
  share = right(read(run.params, kept, inputs))
  print(f"passes: {n}  {share:.3f}" + "  (as trained)" * (n == passes))

# %% [markdown]
# ## Watch the fast weights change
#
# The fast weights of one example, one matrix per head, starting from zero:
# after each pass over the first window, and then over the second.

# %%
from loopjax.analysis.plots import draw


def heads(kept):
  """The matrices of example 0 side by side."""
  return np.concatenate(list(kept.parts[1].state.fast[0, 0, 0]), axis=1)


# %%
by_pass = [sleep(run.params, inputs[:1], n) for n in range(1, passes + 1)]
last = float(np.abs(heads(by_pass[-1][-1])).max())
figure = draw.new(11, 4.2)
grid = figure.subplots(2, passes, squeeze=False)
for window, row in enumerate(grid):
  for n, axes in enumerate(row):
    image = axes.imshow(
      heads(by_pass[n][window]), cmap="RdBu", vmin=-last, vmax=last
    )
    axes.set_title(f"window {window + 1}, pass {n + 1}", fontsize=10)
    axes.set_xticks([])
    axes.set_yticks([])
figure.colorbar(image, ax=list(grid.ravel()), label="fast weight", shrink=0.8)
figure.suptitle("Fast weights, heads side by side: keys by values")
draw.save(figure, workdir / "fast_weights.png")

from IPython.display import Image, display

display(Image(filename=workdir / "fast_weights.png"))


# %% [markdown]
# ## Is the window really in there?
#
# Give every example the fast weights of its neighbour in the batch. If they
# hold the window, the answers are now the neighbour's; without them, the model
# can only guess. (Only the first cell is compared: the second is predicted
# after the first one's true value, which belongs to the example itself.)


# %%
def answer_with(change):
  kept = sleep(run.params, inputs, passes)[-1]
  state = kept.parts[1].state
  state = state._replace(fast=change(state.fast))
  prelude, core, coda = kept.parts
  parts = (prelude, core._replace(state=state), coda)
  logits = read(run.params, kept._replace(parts=parts), inputs)
  return np.asarray(logits.argmax(-1)[:, 0])


# %%
own, other = targets[:, 0], np.roll(targets[:, 0], 1)
for name, change in {
  "its own": lambda fast: fast,
  "its neighbour's": lambda fast: np.roll(fast, 1, axis=2),
  "zeros": np.zeros_like,
}.items():
  said = answer_with(change)
  print(
    f"fast weights: {name:16} as its own window says {np.mean(said == own):.3f}"
    f"   as the neighbour's says {np.mean(said == other):.3f}"
  )

# %% [markdown]
# ## Next steps
#
# * One pass, trained for the same number of steps:
#   `--config=configs/automaton_sleep.py:tiny,model.num_loops=1`; three seeds of
#   both are in `docs/results.md`.
# * Sliding windows, gradients through fewer passes:
#   `model.eviction`, `model.num_with_gradient`.
# * Memory inserted into a trained looped model: `docs/families/sleep.md`.
