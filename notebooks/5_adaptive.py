# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Adaptive loops: where a language model spends its iterations
#
# *Adaptive Loops and Memory* (arXiv 2603.08391) puts the loop inside each
# layer: a token passes through the same block up to $N$ times,
#
# $$p_t = \sigma(W_h [h^{(t)};\, t/N] + b_h), \qquad
# p_{\mathrm{halt}}^{(t)} = p_t \prod_{i<t} (1 - p_i) \qquad
# \text{(equations 3 and 4)},$$
#
# $$h^{(t)} = h^{(t-1)} + s_t\, f_\theta(\mathrm{LN}(h^{(t-1)})) \qquad
# \text{(equation 5)},$$
#
# and the output of the layer is $\sum_t p_{\mathrm{halt}}^{(t)} h^{(t)}$.
# Nothing in the loss rewards or penalises loops; with $p_{\mathrm{halt}}$ a
# token has an expected number of iterations $E[n] = \sum_t t\,
# p_{\mathrm{halt}}^{(t)}$ (equation 12). Each layer also queries its own bank
# of learned slots, and a bank shared by all layers (equations 6 to 10).
#
# Where does a model spend its iterations?

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
# Bytes of two sources with equal numbers of rows: synthetic arithmetic such as
# `7*(3-12)=6`, modulo 23, and this package's own code. Two layers of width 128
# and three iterations. For your own text, set `task.train_files`.
#
# The preset's iterations are not the paper's: the first is the plain block, and
# later ones add $s_t\,(f_\theta(h) - h)$. The paper's start near the identity.

# %%
from loopjax import config as config_lib
from loopjax import train
from loopjax.config import presets

get_config = presets.read("configs/lm_adaptive.py")["get_config"]
small = "tiny,run.num_steps=500,run.checkpoint_every=500,run.log_every=100"
sources = {
  "task.train_files": "made:arithmetic,loopjax/*/*.py",
  "task.mixture": (0.5, 0.5),
}

# %%
if SMOKE:
  small += (
    ",model.width=16,model.num_local_slots=8,model.num_global_slots=4,"
    "task.sequence_length=32,optim.warmup_steps=2,run.num_steps=20,"
    "run.checkpoint_every=20,run.log_every=10,eval.every=10,"
    "eval.num_examples=64,task.validation_share=0.2,task.test_share=0.2"
  )
  sources = {"task.train_files": "loopjax/nn/*.py"}
config = get_config(small)
config_lib.override(config, sources)
workdir = RUNS / "adaptive"
summary = train.run(config, workdir, "train_and_eval")
bits = summary["metrics"]["test/bits_per_byte"]
print(f"{summary['parameters']:,} parameters, {summary['wall_seconds']:.0f} s")
print(f"{bits:.2f} bits per byte of text that it has not seen")

# %% [markdown]
# ## When layers begin to loop
#
# Expected iterations of each layer over training, and against the loss
# (figures 2 and 3 of the paper).

# %%
from IPython.display import display
from PIL import Image

from loopjax.saved import trained
from loopjax.analysis import adaptive, halting
from loopjax.analysis.plots import draw
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
  pictures = [Image.open(f) for f in files if f.suffix == ".png"]
  display(*(picture.convert("RGB").quantize(200) for picture in pictures))


show(adaptive.draw_loops(evaluated))

# %% [markdown]
# ## Where it iterates
#
# This is unseen text. The colour of each character shows the iterations spent
# on *predicting* it, in the layer that loops most.

# %%
import numpy as np

from loopjax.data.text.tokenizer import Tokenizer

num_rows = min(64, len(evaluated.batch["inputs"]))
output = evaluated.forward(("halting",), num_examples=num_rows)
iterations = halting.expected_steps(output.trace["halting"])  # E[n], [B, T, L]
print("E[n] by layer:", iterations.mean(axis=(0, 1)).round(2))
layer = iterations.mean(axis=(0, 1)).argmax()
spent = iterations[..., layer]

batch = {name: x[:num_rows] for name, x in evaluated.batch.items()}
tokenizer = Tokenizer(settings.task.tokenizer)


# %%
def draw_text(rows, width=64):
  """Targets of some rows, each token coloured by its iterations."""
  parts = []
  for row in rows:
    here = batch["weights"][row] > 0
    ids, steps = batch["targets"][row][here], spent[row][here]
    pad = -len(ids) % width
    ids = [tokenizer.decode([i]) if i < 256 else " " for i in ids] + [""] * pad
    steps = np.pad(steps, (0, pad), constant_values=np.nan)
    parts.append((np.reshape(ids, (-1, width)), steps.reshape(-1, width)))
  letters, colors = (np.concatenate(part) for part in zip(*parts, strict=True))
  figure = draw.new(0.155 * width + 1.2, 0.27 * len(letters) + 0.3)
  axes = figure.subplots()
  low, high = np.nanquantile(spent, (0.02, 0.98))
  image = axes.imshow(colors, cmap="YlOrRd", vmin=low, vmax=high, aspect="auto")
  for (line, column), letter in np.ndenumerate(letters):
    shown = {"\n": "↵"}.get(letter, letter)
    dark = (colors[line, column] - low) / max(high - low, 1e-6) > 0.6
    axes.text(
      column, line, shown, family="monospace", fontsize=9, ha="center",
      va="center", color="white" if dark else "black", parse_math=False,
    )  # fmt: skip
  axes.axis("off")
  figure.colorbar(image, ax=axes, label="iterations", pad=0.01)
  return draw.save(figure, workdir / "text.png")


# %%
source = batch["group/source"]
chosen = [np.flatnonzero(source == s)[:4] for s in np.unique(source)]
show([draw_text(np.concatenate(chosen))])

# %% [markdown]
# ## Which characters
#
# These are means by the kind of the predicted character, and by how hard it was
# to predict. Are iterations spent where the loss is high?

# %%
from loopjax.losses import tokens as losses

targets, there = batch["targets"], batch["weights"] > 0
loss = np.asarray(losses.token_cross_entropy(output.logits, targets))
kinds = {
  "all": there,
  "first digit after =": there & (batch["inputs"] == ord("=")),
  "other digits": np.isin(targets, [*b"0123456789"]),
  "letters": np.char.isalpha(np.vectorize(chr)(targets % 256)),
  "spaces": targets == ord(" "),
  "ends of lines": targets == ord("\n"),
}
print(f"{'':20} {'count':>7} {'E[n]':>6} {'loss, nats':>11}")
for name, chosen in kinds.items():
  chosen = chosen & there
  if chosen.any():
    numbers = chosen.sum(), spent[chosen].mean(), loss[chosen].mean()
    print("{:20} {:7} {:6.2f} {:11.2f}".format(name, *numbers))
correlation = np.corrcoef(spent[there], loss[there])[0, 1]
print(f"correlation of iterations and loss: {correlation:.2f}")

# %% [markdown]
# In the run shown here they are not: all digits get nearly three iterations,
# whether they follow from their line or are random, and letters fewer. The
# layer distinguishes kinds of text. Whether it computes anything in these
# iterations is another question: `--sweep=arithmetic`.
#
# ## Stop early
#
# At inference a token can stop once its $p_{\mathrm{halt}}$ sum to a threshold;
# the iteration at which it stops gets the remainder. How many iterations then
# count, and what is the loss in quality? (Later tokens attend to the keys and
# values of every iteration: compute is saved only once a whole row has
# stopped.)

# %%
show(adaptive.draw_exits(evaluated))

# %% [markdown]
# ## Next steps
#
# * The paper's ten models, with and without loops and banks, at equal
#   parameters and FLOPs: `loopjax sweep
#   --config=configs/lm_adaptive.py --sweep=table_1`.
# * A penalty on iterations (equation 11): `model.ponder_weight=0.01`.
