# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # MELT: one cache for all loops
#
# A looped model that generates token by token stores keys and values of *every*
# loop: $K$ times the memory of a model without loops. MELT (arXiv 2605.07721)
# stores one row per token. Usually, loop $t$ computes keys and values from its
# input $x_t$; here it computes them from a latent that a gate updates from loop
# to loop,
#
# $$z_t = \sigma(W_z x_t + U_z h_{t-1} + b_z), \qquad
# h_t = z_t \odot h_{t-1} + (1 - z_t) \odot x_t \qquad \text{(section 3.2)},$$
#
# and each loop writes its keys and values, $W_K h_t$ and $W_V h_t$, over the
# previous loop's. A trained looped model is converted in two phases: first the
# input of keys and values changes gradually from $x_t$ to $h_t$ (interpolated
# transition), then attention outputs are also aligned with the looped model's
# (section 3.3).

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
# ## A looped model, the teacher
#
# The teacher has four loops of two layers of width 64. It is trained on
# synthetic sums modulo 23 such as `7*(3-12)=6`, byte by byte.

# %%
from loopjax import config as config_lib
from loopjax import train
from loopjax.config import presets

get_config = presets.read("configs/lm_melt.py")["get_config"]
size = "tiny,model.width=64,task.sequence_length=64"
if SMOKE:
  size = (
    "tiny,model.width=16,task.sequence_length=32,optim.warmup_steps=2,"
    "task.train_files=loopjax/nn/*.py,task.validation_share=0.2,"
    "task.test_share=0.2"
  )


# %%
def run(name, num_steps, **settings):
  """Trains or resumes a run; returns its directory."""
  steps = 20 if SMOKE else num_steps
  config = get_config(size)
  values = {
    "run.num_steps": steps, "run.checkpoint_every": steps,
    "run.log_every": steps // 2, "eval.every": 20,
    "eval.num_examples": 64,
  }  # fmt: skip
  more = {key.replace("__", "."): value for key, value in settings.items()}
  config_lib.override(config, {**more, **values})
  workdir = RUNS / "melt" / name
  summary = train.run(config, workdir, "train_and_eval")
  bits = summary["metrics"]["test/bits_per_byte"]
  print(f"{name}: {bits:.3f} bits per byte, {summary['wall_seconds']:.0f} s")
  return workdir


teacher = run("teacher", 300, model__name="looped", optim__rates=())

# %% [markdown]
# ## Phase 1, then phase 2
#
# All of the teacher's parameters are reused; only the gates are new. In phase 1
# $\alpha$, the latent's weight in keys and values, rises from 0 to 1, and every
# loop's read-out is distilled from the teacher's. Training processes texts in
# chunks of 16 tokens, with gradients through the rows of all earlier chunks.

# %%
slower = {"optim__learning_rate": 1e-3, "optim__muon_learning_rate": 5e-3}
taught = {
  **slower, "run__teacher": str(teacher), "model__distill": "all",
}  # fmt: skip
num_steps = 20 if SMOKE else 100
first = run(
  "phase_1", num_steps, **taught, run__init_from=str(teacher),
  run__init_fresh="latent_gates", model__alpha=0.0,
  model__interpolation_steps=num_steps,
)  # fmt: skip
second = run(
  "phase_2", 60, **taught, run__init_from=str(first), model__align_weight=0.1
)

# %% [markdown]
# ## What does sharing cost?
#
# Here the models process unseen rows token by token, as in generation. The
# loops of the looped model can also share keys and values without any training:
# one loop's, or their mean (the paper's table 5). Bytes are buffer sizes.

# %%
import jax
import numpy as np
from flax import nnx

from loopjax import program
from loopjax.saved import trained
from loopjax.models import MODELS

settings = trained.read(second).settings
test = settings.task_module.make_dataset(
  settings.task, "test", batch_size=settings.eval.batch_size, seed=0
)
batch = test.batches[0]
whole = np.all(batch["weights"] > 0, axis=1)
whole &= np.ptp(batch["documents"], axis=1) == 0  # Rows of one document.
inputs, targets = batch["inputs"][whole], batch["targets"][whole]


# %%
def read_bits(workdir, kind):
  """Bits per byte, token by token with a kind of cache."""
  model_run = trained.read(workdir)
  name = model_run.settings.plain["model"]["name"]
  reading = MODELS[name].reading

  @jax.jit
  def losses(params, inputs, targets):
    model = nnx.merge(model_run.graphdef, params)
    cache = reading.empty_cache(model, len(inputs), inputs.shape[1], kind=kind)

    def read(cache, pair):
      token, following = pair
      output, cache = reading.read(model, token[:, None], cache)
      log_chances = jax.nn.log_softmax(output.logits[:, 0])
      taken = jax.numpy.take_along_axis(log_chances, following[:, None], axis=1)
      return cache, -taken[:, 0]

    return jax.lax.scan(read, cache, (inputs.T, targets.T))[1]

  by_token = program.cache_bytes(model_run.settings, kind)[0]
  nats = losses(model_run.params, inputs, targets)
  return by_token, float(np.mean(nats)) / np.log(2)


# %%
rows = {
  "looped, keys of every loop": (teacher, "per_loop"),
  "looped, of the first loop": (teacher, "first_loop"),
  "looped, of the last loop": (teacher, "last_loop"),
  "looped, their mean": (teacher, "mean"),
  "MELT after phase 1": (first, "latent"),
  "MELT after phase 2": (second, "latent"),
}
print(f"{'':28} {'bytes a token':>13} {'32,768 tokens':>14} {'bits':>6}")
found = {}
for name, of in rows.items():
  by_token, bits = found[name] = read_bits(*of)
  total = f"{by_token * 32_768 / 1e6:.0f} MB"
  print(f"{name:28} {by_token:13,} {total:>14} {bits:6.3f}")

# %%
from IPython.display import display
from PIL import Image

from loopjax.analysis.plots import draw
from loopjax.run import workdir as workdir_lib

# %%
figure = draw.new(10, 3.8)
left, right = figure.subplots(1, 2)
start = 0
for name, workdir in (("phase 1", first), ("phase 2", second)):
  logged = [
    (start + row["step"], row["bits_per_byte"])
    for row in workdir_lib.read_metrics(workdir)
    if row["split"] == "validation"
  ]
  left.plot(*zip(*logged, strict=True), marker="o", ms=4, label=name)
  start = logged[-1][0]

# %%
last = workdir_lib.read_json(teacher / "summary.json")["metrics"]
left.axhline(last["validation/bits_per_byte"], color=draw.GREY, linestyle=":")
draw.tidy(left, "On the way (dotted: the teacher)", "step", "bits per byte")
left.legend(frameon=False)
for (name, (by_token, bits)), color, marker in zip(
  found.items(), draw.PALETTE, "os^vD*", strict=False
):
  right.plot(  # Hollow and of different sizes, to show coinciding points.
    by_token, bits, marker, color=color, label=f"{name}: {bits:.2f}",
    ms=14 if marker == "*" else 7, fillstyle="none", mew=1.6,
  )  # fmt: skip
right.set_xscale("log", base=2)
draw.tidy(right, "At the end", "bytes of cache a token", "bits per byte")
right.legend(frameon=False, fontsize=8)
path = draw.save(figure, second / "caches.png")
display(Image.open(path).convert("RGB").quantize(200))

# %% [markdown]
# In the run shown here, sharing keys and values without training makes the
# model much worse, even with their mean. MELT uses a quarter of the cache and
# loses less than 1 %. Sums depend little on distant tokens, and phase 2 adds
# little: the paper generates up to 32,768 tokens.
#
# ## Generate
#
# Both models decode greedily. Sums are modulo 23, as in the synthetic text. In
# these few minutes, neither model has learned more about addition than the form
# of a result.

# %%
from loopjax.saved import language_model as language_model_lib
from loopjax.generate import source, text
from loopjax.generate.engine import GenerationRequest, Sampling

sums = ("3+4=", "9-2=", "2*5=", "(1+2)*3=", "20+20=", "5-(6-4)=")
greedy = Sampling(temperature=0.0)


# %%
def write(workdir):
  language_model = language_model_lib.load(workdir)
  engine = source.make_engine(
    language_model, num_slots=len(sums), max_tokens=32
  )
  prompts = [language_model.tokenizer.encode_prompt(one) for one in sums]
  requests = [GenerationRequest(prompt, 8, greedy) for prompt in prompts]
  written = text.generate_texts(
    engine, language_model.tokenizer, requests, stops=["\n"]
  )
  print(f"{engine.cache_kind}: {engine.cache_bytes:,} bytes of cache")
  return [one.text for one in written]


# %%
answers = {
  name: write(of) for name, of in (("looped", teacher), ("MELT", second))
}
print(f"{'':10} {'looped':>8} {'MELT':>8} {'right':>8}")
for index, one in enumerate(sums):
  value = eval(one[:-1]) % 23
  said = (answers[name][index] for name in answers)
  print("{:10} {:>8} {:>8} {:>8}".format(one, *said, value))

# %% [markdown]
# ## At the paper's sizes
#
# These are the same sizes for the paper's models (its table 2).

# %%
from loopjax.analysis import memory

print(memory.table_2().split("\n\n")[0])

# %% [markdown]
# ## Next steps
#
# * All of this in one command, at the preset's size: `loopjax sweep
#   --config=configs/lm_melt.py --sweep=pipeline`; the effect of each part
#   (table 4): `--sweep=components`.
# * From published weights: import Ouro (`loopjax hub import`), then
#   `--config=configs/lm_melt.py:paper,run.init_from=runs/ouro`.
