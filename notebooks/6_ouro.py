# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Ouro: a looped language model that knows when to stop
#
# Ouro (arXiv 2510.25741) is one stack of blocks, applied $K = 4$ times to every
# token, with a read-out and an exit gate after every loop. With the gate's
# $\lambda_t$, the probability of exiting after loop $t$ if it is reached,
#
# $$p_t = \lambda_t \prod_{s<t} (1 - \lambda_s), \qquad
# p_K = \prod_{s<K} (1 - \lambda_s) \qquad \text{(section 3.2)},$$
#
# and the model is trained on the expected loss, with an entropy term that keeps
# all exits in use:
#
# $$\mathcal{L} = \sum_t p_t\, \mathcal{L}_t - \beta H(p).$$
#
# At inference a token exits after the first loop at which $\sum_{s \le t} p_s$
# is at least a threshold $q$.

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
# ## The model
#
# On an accelerator, this uses the published weights, 2.9 GB from the Hugging
# Face Hub. On a CPU, or if the Hub is unavailable, it trains a small LoopLM
# with the same parts: the preset `tiny` of `configs/lm_looped.py` on the bytes
# of this package's own code. **The outputs shown here are from the small
# model.** The cells are the same for both.

# %%
import jax

from loopjax import train
from loopjax.config import presets
from loopjax.hub import convert

OURO = "ByteDance/Ouro-1.4B-Thinking"  # "" for the small model.
PUBLISHED = bool(OURO) and jax.default_backend() != "cpu" and not SMOKE
if PUBLISHED:
  try:
    from huggingface_hub import snapshot_download

    folder = snapshot_download(OURO, allow_patterns=["*.json", "*.safetensors"])
  except Exception as error:  # Any error of the network or the library.
    print(f"{OURO} cannot be had: {type(error).__name__}: {error}")
    PUBLISHED = False

# %%
workdir = RUNS / ("ouro" if PUBLISHED else "looplm")
if not PUBLISHED:
  get_config = presets.read("configs/lm_looped.py")["get_config"]
  small = (
    "tiny,task.train_files=loopjax/*/*.py,run.batch_size=8,run.num_steps=400,"
    "run.checkpoint_every=400,run.log_every=50,eval.every=100"
  )
  if SMOKE:
    small = (
      "tiny,task.train_files=loopjax/nn/*.py,model.width=16,"
      "task.sequence_length=32,optim.warmup_steps=2,run.num_steps=20,"
      "run.checkpoint_every=20,run.log_every=10,eval.every=10,"
      "eval.num_examples=64,task.validation_share=0.2,task.test_share=0.2"
    )
  summary = train.run(get_config(small), workdir, "train_and_eval")
  seconds = summary["wall_seconds"]
  print(f"{summary['parameters']:,} parameters, {seconds:.0f} s")
elif not (workdir / "config.json").exists():
  convert.import_folder(pathlib.Path(folder), workdir, dtype="bfloat16")

# %% [markdown]
# ## Generate
#
# `language_model.load` loads a run; `Engine` generates many texts at once. With
# a chat template the model answers a question; otherwise it continues a text.

# %%
from loopjax.saved import language_model as language_model_lib
from loopjax.data.text import chat
from loopjax.generate import source, text
from loopjax.generate.engine import GenerationRequest, Sampling

language_model = language_model_lib.load(workdir)
tokenizer, loops = language_model.tokenizer, language_model.call["num_loops"]
if PUBLISHED:
  conversation = [
    {"role": "user", "content": "Why do loops help? Two sentences."}
  ]
  (ids,) = tokenizer.encode(
    [chat.template(workdir / convert.DIRECTORY)(conversation)]
  )
  prompt = tuple(ids.tolist())
else:
  prompt = tokenizer.encode_prompt("def loss(")

# %%
length = min(16 if SMOKE else 256, language_model.context_length - len(prompt))
texts = 2 if SMOKE else 4
engine = source.make_engine(
  language_model, num_slots=texts, max_tokens=len(prompt) + length
)


def write(threshold, num_tokens=length):
  """Generates as many texts as the engine has slots."""
  requests = [
    GenerationRequest(
      prompt, num_tokens, Sampling(temperature=0.6, seed=seed),
      stop_tokens=(tokenizer.end,), exit_threshold=threshold,
    )
    for seed in range(texts)
  ]  # fmt: skip
  return text.generate_texts(engine, tokenizer, requests)


print(tokenizer.decode(prompt[1:]) + write(1.0)[0].text)

# %% [markdown]
# ## Exit early
#
# We run the same prompt at several thresholds, and print the loops per token
# and the tokens per second. A batch leaves the loop when its last text exits.

# %%
import time

thresholds = (1.0, 0.9, 0.7, 0.5, 0.3, 0.1)
for threshold in thresholds:
  write(threshold)  # Compiles everything in advance.
print(f"{'threshold':>9} {'loops a token':>14} {'tokens a second':>16}")
for threshold in thresholds:
  started = time.monotonic()
  written = write(threshold)
  seconds = time.monotonic() - started
  count = sum(one.costs.tokens for one in written)
  ran = sum(one.costs.loops for one in written) / count
  print(f"{threshold:9} {ran:14.2f} {count / seconds:16.0f}")

# %% [markdown]
# ## The cost in quality
#
# The model now processes unseen text with twice the trained number of loops.
# Every loop is read out: its loss, its most likely next token, and the gate.
# `exits.curve` then compares exits by the gate with a fixed number of loops.

# %%
import jax.numpy as jnp
import numpy as np
from flax import nnx
from IPython.display import display
from PIL import Image

from loopjax.analysis import exits
from loopjax.analysis.plots import draw


def show(files):  # Few colours keep the notebook small.
  pictures = [Image.open(f) for f in files if f.suffix == ".png"]
  display(*(picture.convert("RGB").quantize(200) for picture in pictures))


# %%
@jax.jit
def observe(params, rows):
  """Every loop's read-out after each token of rows [B, T]."""
  model = nnx.merge(language_model.graphdef, params)

  def of_row(row):
    output = model(row[None], num_loops=2 * loops, trace=("hidden",))
    hidden = output.trace["hidden"][:, 0, :-1]  # [2K, T - 1, D]
    log_chances = jax.nn.log_softmax(model.logits(hidden))
    following = jnp.broadcast_to(row[1:], log_chances.shape[:2])[..., None]
    return {
      "loss": -jnp.take_along_axis(log_chances, following, axis=-1)[..., 0],
      "token": jnp.argmax(log_chances, axis=-1),
      "chance": jnp.exp(jnp.max(log_chances, axis=-1)),
      "gate": model.exit_logits(hidden[:loops]),
    }

  return jax.lax.map(of_row, rows)


# %%
size = min(256, language_model.context_length)
unseen = "".join(
  path.read_text(encoding="utf-8")
  for path in sorted(pathlib.Path("configs").iterdir())
)
(ids,) = tokenizer.encode([unseen])
rows = np.resize(ids, (len(ids) // (size - 1), size - 1))[: 4 if SMOKE else 128]
rows = np.pad(rows, ((0, 0), (1, 0)), constant_values=tokenizer.end)
seen = {
  name: np.swapaxes(value, 0, 1)  # [loops, rows, tokens]
  for name, value in jax.device_get(
    observe(language_model.params, rows)
  ).items()
}
found = exits.ExitMeasurements(
  losses=seen["loss"],
  gates=seen["gate"],
  changes=np.zeros_like(seen["gate"]),  # Used by another rule.
  weights=np.ones_like(seen["loss"][0]),
)

# %%
figure = draw.new(7.5, 4.2)
axes = figure.subplots()
for by, color in (("fixed", draw.GREY), ("gate", draw.BLUE)):
  points = exits.curve(found, loops, by)
  x, y, error = ([p[k] for p in points] for k in ("loops", "loss", "error"))
  axes.errorbar(x, y, error, color=color, marker="o", ms=4, capsize=2, label=by)
axes.axvline(loops, color=draw.GREY, linestyle=":")
draw.tidy(axes, f"{len(rows)} rows", "loops per token", "nats per token")
axes.legend(frameon=False)
show([draw.save(figure, workdir / "exits.png")])

# %% [markdown]
# In the run shown here, three loops are better than the four of training, and
# more than four do harm. The gate, which chooses a number for each token, is
# slightly better than any fixed number. A gate that had learned nothing would
# lie on the line.
#
# ## What would each loop predict?
#
# The *lens*: the read-out of every loop, over a part of that text. Each square
# is the most likely next token, darker if more likely; the frame marks the loop
# after which the gate exits at $q = 0.5$.

# %%
steps = exits.exit_steps(found, loops, "gate", 0.5)
row = min(20, len(rows) - 1)
here = slice(min(8, size - 9), min(44, size - 1))


def shown(token):
  text = tokenizer.decode([int(token)]) if token != tokenizer.end else "¶"
  return {"\n": "↵", " ": "␣"}.get(text, text.strip())


given, said = rows[row, :-1][here], seen["token"][:loops, row, here]
sure, left = seen["chance"][:loops, row, here], steps[row, here]

# %%
figure = draw.new(0.3 * len(given) + 1.6, 0.42 * loops + 1.1)
axes = figure.subplots()
image = axes.imshow(sure, cmap="Blues", vmin=0, vmax=1, aspect="auto")
for (loop, column), token in np.ndenumerate(said):
  color = "white" if sure[loop, column] > 0.6 else "black"
  axes.text(
    column, loop, shown(token), color=color, ha="center", va="center",
    family="monospace", fontsize=9, parse_math=False,
  )  # fmt: skip

# %%
axes.scatter(
  np.arange(len(given)), left - 1, s=260, marker="s", facecolors="none",
  edgecolors=draw.ORANGE, linewidths=1.6,
)  # fmt: skip
axes.set_xticks(
  range(len(given)), [shown(t) for t in given], family="monospace"
)
axes.set_yticks(range(loops), [f"loop {n + 1}" for n in range(loops)])
axes.set_xlabel("after this token comes …")
axes.tick_params(length=0)
figure.colorbar(image, ax=axes, label="probability", pad=0.01)
show([draw.save(figure, workdir / "lens.png")])

# %% [markdown]
# Which tokens exit early? The fraction of tokens that exit after each loop, how
# many of them are correct there, and how many would be correct after the last
# loop.

# %%
right = seen["token"][:loops] == rows[None, :, 1:]
print(f"{'loop':>4} {'leave':>6} {'right here':>11} {'right at last':>14}")
for n in range(loops):
  leaves = steps == n + 1
  if leaves.any():
    here, last = right[n][leaves].mean(), right[-1][leaves].mean()
    print(f"{n + 1:4} {leaves.mean():6.3f} {here:11.3f} {last:14.3f}")

# %% [markdown]
# In the run shown here, exits cost nothing: tokens that exit early would be
# correct slightly *less* often after the last loop.
#
# ## Next steps
#
# * In the terminal: `loopjax generate runs/lm_looped --prompt='It was'
#   --exit_threshold=0.5 --report`; with the published weights `FOLDER --chat`.
# * Training only the gate, on the improvement by each loop (section 3.4):
#   `--config=configs/lm_looped.py:second_stage,run.init_from=runs/lm_looped`.
# * Four loops with the cache of one: [notebook 4](4_melt.ipynb).
