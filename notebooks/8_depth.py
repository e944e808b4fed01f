# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Recurrent depth: more loops than it was trained with
#
# Huginn (arXiv 2502.05171) repeats only its middle layers, the core $R$,
# between a prelude $P$ and a coda $C$ that run once:
#
# $$e = P(x), \qquad h_k = R(e, h_{k-1}), \qquad p = C(h_K).$$
#
# The prelude's output enters every loop, the state $h_0$ is random, and
# training draws the number of loops $K$ at every step. The model should
# therefore run with any number of loops. Does it? And which of these choices
# matters for that?
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
# ## Train
#
# Three models with four loops, on this package's own code: a plain loop over
# the core; Huginn's loop, with the prelude's output in every loop, norms of
# sums and a random state, but always four loops; and the same with a random
# number of loops, four on average.

# %%
from loopjax import config as config_lib
from loopjax import train
from loopjax.analysis import figures
from loopjax.config import presets

get_config = presets.read("configs/lm_recurrent.py")["get_config"]
small = "tiny,model.width=64,model.num_loops=4,run.num_steps=200"
small += ",run.checkpoint_every=200,run.log_every=50,eval.every=200"
small += ",task.sequence_length=64,eval.num_examples=256"
if SMOKE:
  small += ",model.width=16,model.num_heads=2,optim.warmup_steps=2"
  small += ",run.num_steps=20,run.checkpoint_every=20,run.log_every=10"
  small += ",eval.every=10,eval.num_examples=64,eval.depth_examples=16"
  small += ",task.validation_share=0.2,task.test_share=0.2"

# %%
fixed = {"model.depth": "fixed", "model.num_with_gradient": 0}
plain = {
  "model.injection": "none", "model.state": "input",
  "model.loop_norm": "final_only",
}  # fmt: skip
models = {
  "plain loop": {**fixed, **plain, "model.norm_order": "pre"},
  "injection": fixed,
  "injection, depth drawn": {"model.calibrated": True},
}

# %%
text = "loopjax/nn/*.py" if SMOKE else "loopjax/*/*.py"
found = {}
for name, changes in models.items():
  config = get_config(small)
  config_lib.override(config, {"task.train_files": text, **changes})
  workdir = RUNS / f"depth_{name.replace(', ', '_').replace(' ', '_')}"
  summary = train.run(config, workdir, "train_and_eval", figures.finish)
  found[name] = summary["metrics"]

# %% [markdown]
# ## Loss after every loop
#
# After training, every loop of one pass was read out, up to eight times the
# trained number (`eval.depth_factor`); `loop=k` is after $k + 1$ loops.

# %%
import numpy as np
from IPython.display import display
from PIL import Image

from loopjax.analysis.plots import draw


def by_loop(metrics, name, num_loops=32):
  return np.array([metrics[f"depth/{name}/loop={k}"] for k in range(num_loops)])


print(f"{'bits a byte after':24} {'1':>6} {'2':>6} {'4':>6} {'8':>6} {'32':>6}")
for name, metrics in found.items():
  bits = by_loop(metrics, "bits_per_byte")
  shown = " ".join(f"{bits[k - 1]:6.3f}" for k in (1, 2, 4, 8, 32))
  print(f"{name:24} {shown}")

# %%
figure = draw.new(10, 4)
panels = zip(
  figure.subplots(1, 2),
  ("bits_per_byte", "relative_change"),
  ("Bits a byte", "Change of the state by a loop"),
  strict=True,
)
for axes, score, title in panels:
  for (name, metrics), color in zip(found.items(), draw.PALETTE, strict=False):
    axes.plot(range(1, 33), by_loop(metrics, score), label=name, color=color)
  axes.axvline(4, color=draw.GREY, linestyle=":")
  axes.set_xscale("log", base=2)
  axes.set_yscale("log")
  draw.tidy(axes, title, "loops run; trained with 4", "")
  axes.legend(frameon=False, fontsize=9)
path = draw.save(figure, RUNS / "depth.png")
display(Image.open(path).convert("RGB").quantize(200))

# %% [markdown]
# ## How much of the state passes
#
# A linear injection maps $[h; e]$ to the core's input. The spectral norm of the
# half that acts on $h$ bounds what remains of the state before the core.

# %%
for name, metrics in found.items():
  radius = metrics.get("depth/injection_radius")
  shown = "no injection" if radius is None else f"{radius:.2f}"
  correlation = by_loop(metrics, "token_correlation")
  print(f"{name:24} {shown:>13}; cosine of tokens with their mean after")
  print(f"{'':24} 4 loops {correlation[3]:.2f}, 32 loops {correlation[31]:.2f}")

# %% [markdown]
# In this run, of one seed and 200 steps, the plain loop gets worse beyond the
# four loops of training, though its state changes less and less. With the
# injection and its norms it stays as good, even without random depth. Random
# depth improves the loss after one loop and makes the state converge, at a
# small cost at the trained depth: inference can then stop when the state or the
# read-out no longer changes (`--exit_rule=change`, `kl`). On novels, with three
# seeds: `benchmarks/results/2026-11-28_cpu_2cores_recurrent_depth.md`.
