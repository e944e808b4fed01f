# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Your own looped model, in fewer than a hundred lines
#
# A new halting rule, a new model family and a new config, trained by the same
# trainer and tested by existing tests.
#
# The idea: a token stops at the first loop at which the model is *confident*,
# and that loop's prediction is its answer. There is no router and no remainder.
# (ACT, arXiv 1603.08983, sums a router's outputs, section 2.1; PonderNet, arXiv
# 2107.05407, samples, equations 6 and 7.) To make every loop's prediction
# useful, the loss is the mean over all loops.

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
# ## The rule
#
# A halting rule is a frozen record with two functions (`loop/halting.py`). It
# receives a number in [0, 1] for each token and step, and returns the weight of
# that step's output; the weights of a token sum to one.

# %%
import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from loopjax import checks
from loopjax import types as records
from loopjax.loop import driver, halting
from loopjax.losses import tokens as losses
from loopjax.nn import attention, block, linear, rope, shape


# %%
@dataclasses.dataclass(frozen=True)
class Confident:
  """All weight goes to the first step that reaches the threshold."""

  threshold: float

  def init(self, shape):
    return halting.FixedSteps().init(shape)

  def update(self, state, confidence, is_last):
    stops = ~state.halted & ((confidence >= self.threshold) | is_last)
    weight = stops.astype(jnp.float32)
    return weight, halting.HaltingState(
      spent=state.spent + weight,
      steps=state.steps + (~state.halted).astype(jnp.float32),
      remainder=state.remainder,
      halted=state.halted | stops,
    )


# %% [markdown]
# ## The family
#
# A family is a record, `protocols.Family`: its `Config`, `Model`, `loss` and
# `costs`, and names of what it records. In the repository, the record would end
# a file in `loopjax/models/`, and `MODELS` would have a line for it. In a
# package of your own, its name in configs is its import path,
# `model.name=my_package.confident`.
#
# The block is the shared one: attention with rotary positions from the task's
# coordinates (row, column and box), and an MLP. The board is added again in
# each loop.


# %%
@dataclasses.dataclass(frozen=True)
class Config:
  width: int = 64
  num_heads: int = 8
  num_loops: int = 8
  threshold: float = 0.9
  precision: str = "float32"

  def block_shape(self):
    return shape.Shape(
      self.width, self.num_heads, num_key_value_heads=self.num_heads,
      head_width=shape.head_width(self.width, self.num_heads),
      mlp_width=shape.mlp_width(self.width, 8 / 3),
    )  # fmt: skip


# %%
class Model(nnx.Module):
  def __init__(self, config, spec, options=records.LoopOptions(), *, rngs):
    self.config, self.spec, self.options = config, spec, options
    shared = {"precision": records.PRECISIONS[config.precision], "rngs": rngs}
    vocabulary, width = spec.vocab_size, config.width
    self.token_embedding = linear.embedding(vocabulary, width, **shared)
    self.block = block.Block(config.block_shape(), **shared)
    self.head = linear.readout(width, vocabulary, **shared)

  def __call__(self, inputs, *, num_loops=None, kind=None, trace=()):
    num_loops = checks.num_loops(self.config, num_loops)
    return think(self, inputs, num_loops, kind or self.options.execution, trace)


# %% [markdown]
# The forward pass is a loop: a function from the carry and the loop's index to
# the next carry and the requested records.


# %%
def think(model, inputs, num_loops, kind, trace):
  rule, board = Confident(model.config.threshold), model.token_embedding(inputs)
  places = jnp.asarray(model.spec.coordinates)
  head_width = model.config.block_shape().head_width
  metadata = attention.Metadata(rope.rope_tables(places, head_width, 10.0))

  def step(carry, k):
    hidden, answer, state = carry
    hidden, _ = model.block(hidden + board, metadata)
    logits = model.head(hidden)
    record = {"hidden": hidden, "logits": logits}
    record |= linear.prediction_and_confidence(logits)
    last = k == num_loops - 1
    record["weight"], state = rule.update(state, record["confidence"], last)
    answer = answer + record["weight"][..., None] * logits
    return (hidden, answer, state), {name: record[name] for name in trace}

  logits = jnp.zeros((*inputs.shape, model.spec.vocab_size), jnp.float32)
  start = jnp.zeros_like(board), logits, rule.init(inputs.shape)
  (_, logits, state), traces, steps_run = driver.run_loop(
    step, start, num_loops, kind=kind, remat=model.options.remat,
    done_fn=lambda carry: jnp.all(carry[2].halted),
  )  # fmt: skip
  stats = {
    "ponder_steps": jnp.mean(state.steps, axis=1),
    "loops_run": jnp.full(len(inputs), steps_run, jnp.float32),
  }
  return records.Output(logits, {}, stats, loops={}, trace=traces)


# %% [markdown]
# The loss is the mean cross-entropy over loops, which trains each loop to
# answer; the costs are FLOPs after each number of loops.


# %%
def loss(model, batch, key, step, teacher):
  output = model(batch["inputs"], trace=("logits",))
  logits = output.trace["logits"]
  targets = jnp.broadcast_to(batch["targets"][None], logits.shape[:-1])
  by_token = jnp.mean(losses.token_cross_entropy(logits, targets), axis=0)
  weights, of_batch = batch["weights"], batch.get("mean_weight")
  total = losses.weighted_mean(by_token, weights, of_batch)
  steps = jnp.mean(output.stats["ponder_steps"])
  return total, {"ponder_steps": steps}


def costs(config, spec, num_loops):
  tokens = spec.sequence_length
  once = block.flops(config.block_shape(), tokens)
  once += 2 * tokens * config.width * spec.vocab_size
  return {"flops_per_example": [once * (k + 1) for k in range(num_loops)]}


# %%
from loopjax.models import MODELS
from loopjax.protocols import Family

MODELS["confident"] = Family(
  Config=Config,
  Model=Model,
  loss=loss,
  costs=costs,
  traces=("hidden", "logits", "prediction", "confidence", "weight"),
  headline=("ponder_steps",),
)

# %% [markdown]
# ## Tests for free
#
# `tests/models/test_families.py` runs over `MODELS`: every parameter gets a
# gradient, all kinds of loops and rematerialisation agree, early stopping gives
# the same result, costs equal XLA's counts, every setting changes the program,
# and bfloat16 is used only where intended. For pytest, add two entries to that
# file; here we call the functions. They need only a small config of the family,
# and another value for each of its own settings.

# %%
sys.path[:0] = ["tests", "tests/loop", "tests/models"]
import test_families
import test_halting

test_families.SMALL["confident"] = {"width": 16, "num_heads": 2, "num_loops": 2}
test_families.VALUES["threshold"] = (0.5,)
test_families.LAST_IS_UNLIKE.add("confident")  # All tokens halt there.
chances = jax.random.uniform(jax.random.key(0), (12, 50))
test_halting.test_weights_are_a_distribution(Confident(0.9), chances)
print("passed: test_weights_are_a_distribution")
for name, test in list(vars(test_families).items()):
  for mark in getattr(test, "pytestmark", ()):
    names = [getattr(case, "values", [case])[0] for case in mark.args[1]]
    if mark.args[0] == "name" and "confident" in names:
      test("confident")
      print("passed:", name)

# %% [markdown]
# ## The config
#
# A config file has `PRESETS` and `get_config`; `paper` comes first, and the
# other presets override it. Ours has one more preset, which takes minutes.

# %%
from loopjax import config as config_lib
from loopjax import train
from loopjax.config import presets

PRESETS = {
  "paper": {"task": {"augment": True, "box_rows": 2}},
  "tiny": {
    "optim": {"learning_rate": 4e-3, "warmup_steps": 100, "ema_decay": 0.98},
    "run": {
      "num_steps": 800, "batch_size": 16, "checkpoint_every": 800,
      "log_every": 200,
    },
  },
  "smoke": presets.read("configs/common.py")["SUDOKU_SMOKE"],
}  # fmt: skip
PRESETS["smoke"]["model"] = {"width": 16, "num_heads": 2, "num_loops": 2}


# %%
def get_config(arg=""):
  return presets.apply(config_lib.make("confident", "sudoku"), arg, PRESETS)


workdir = RUNS / "your_own"
summary = train.run(get_config("smoke" if SMOKE else ""), workdir, "train")
print(f"{summary['parameters']:,} parameters, {summary['wall_seconds']:.0f} s")

# %% [markdown]
# ## Does it stop when it is correct?
#
# The threshold can be changed after training, since no parameter depends on it.
# Lower thresholds stop earlier; how much accuracy does that cost? (A batch runs
# until its slowest cell has stopped.)

# %%
import numpy as np

from loopjax import program
from loopjax.saved import trained
from loopjax.analysis.plots import draw

run = trained.read(workdir)
settings = run.settings
test = settings.task_module.make_dataset(
  settings.task, "test", batch_size=1024, seed=0
)
batch = test.batches[0]


# %%
def with_threshold(threshold):
  """(exact match, loops per cell, loops of the batch)."""
  model = dataclasses.replace(settings.model, threshold=threshold)
  graphdef, _ = program.abstract_model(settings._replace(model=model))

  @jax.jit
  def forward(params, inputs):
    return nnx.merge(graphdef, params)(inputs, num_loops=16, kind="while")

  output = forward(run.params, batch["inputs"])
  right = settings.task_module.score(output, batch)["exact_match"]
  numbers = right, output.stats["ponder_steps"], output.stats["loops_run"]
  return [float(np.mean(x)) for x in numbers]


# %%
thresholds = (0.5, 0.7, 0.9, 0.97, 0.99, 0.999)
found = np.array([with_threshold(threshold) for threshold in thresholds])
print("threshold  exact match  loops a cell  loops of the batch")
for threshold, row in zip(thresholds, found, strict=True):
  print(f"{threshold:9} {row[0]:12.3f} {row[1]:13.2f} {row[2]:19.0f}")

# %%
figure = draw.new(6, 3.6)
axes = figure.subplots()
axes.plot(found[:, 1], found[:, 0], color=draw.BLUE, marker="o")
for threshold, row in zip(thresholds, found, strict=True):
  axes.annotate(
    f"{threshold:g}", (row[1], row[0]), textcoords="offset points",
    xytext=(5, -12), fontsize=9,
  )  # fmt: skip
title = "Puzzles solved, by the threshold of confidence"
draw.tidy(axes, title, "loops that a cell runs, mean", "exact match")
draw.save(figure, workdir / "thresholds.png")

from IPython.display import Image, display

display(Image(filename=workdir / "thresholds.png"))

# %% [markdown]
# ## Add it to the repository
#
# `docs/howto/model.md` has the steps: the family in
# `loopjax/models/confident.py`, its line in `MODELS`,
# `configs/sudoku_confident.py`, a row in `docs/papers.md`. Then every command
# supports it: `loopjax train --config=configs/sudoku_confident.py`,
# `loopjax score RUN --config.eval.execution=while`, sweeps, reports, meshes and
# checkpoints.
