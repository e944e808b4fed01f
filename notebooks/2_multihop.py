# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Multi-hop questions: find the misaligned bridge, and fix it
#
# *Who is the wife of the teacher of a?* needs two facts: $(a, r_1) \to b$ and
# $(b, r_2) \to c$; $b$ is the bridge. A looped transformer applies one stack
# twice,
#
# $$H^{k+1} = f_\theta(H^k), \qquad H^0 = W[x] \qquad \text{(equation 2)},$$
#
# so the loop that looks up the first fact could also look up the second one.
# DiscoLoop (arXiv 2607.00341) trains it on two graphs. For graph A it sees
# facts and questions that compose them, for graph B only facts. It then answers
# unseen questions about A (ID), but few about B (OOD), although it knows all of
# B's facts.
#
# Why? After loop 1 the bridge can be *read out* of the state. But loop 2 was
# never trained to look up this state in B: the state is not the embedding
# $W[b]$ with which the facts about $b$ were learned. The paper's test: between
# the loops, move the state towards that embedding,
#
# $$H \leftarrow (1 - \alpha)\, H + \alpha\, \mathrm{Norm}(W[b])
# \qquad \text{(equation 3)},$$
#
# without any training. If the second hop then works, the bridge was only
# misaligned.

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
# ## Train the vanilla loop
#
# With half the preset's entities and width 256, this takes a few minutes
# instead of 20. An epoch has every composed question once and every single fact
# 18 times.

# %%
from loopjax import train
from loopjax.config import presets

get_config = presets.read("configs/multihop_disco.py")["get_config"]
small = (
  "tiny,model.name=looped,model.width=256,model.num_heads=4,"
  "task.num_entities=50,task.num_train_chains=(1000,),"
  "task.num_test_chains=(125,),run.num_steps=3000,run.checkpoint_every=3000"
)
config = get_config("smoke,model.name=looped" if SMOKE else small)
workdir = RUNS / "multihop"
summary = train.run(config, workdir, "train")
print(f"{summary['parameters']:,} parameters, {summary['wall_seconds']:.0f} s")

# %% [markdown]
# ## Ask
#
# `questions.gather` parses the test's questions: entities, relations, and the
# first position at which a bridge is determined. An `InstrumentedModel` has
# functions that observe and edit the model's hidden states.

# %%
import numpy as np

from loopjax.saved import trained
from loopjax.analysis.multihop import instrumented, questions

run = trained.read(workdir)
settings = run.settings
test = settings.task_module.make_dataset(
  settings.task, "test", batch_size=settings.eval.batch_size, seed=0
)
question_set = questions.gather(settings.task, test, 0)
model = instrumented.from_run(run)
observed = model.observe(question_set)

for name, hops, rows in question_set.by_split():
  answers = observed.prediction[rows, -1, question_set.last[rows]]
  share = np.mean(answers == question_set.answers[rows])
  print(f"{name:14} {hops} hops, {len(rows):4} questions: {share:.3f} right")

# %% [markdown]
# ## Where is the bridge?
#
# The logit lens applies the model's own read-out to the state after every loop,
# at every position. The frame marks where the bridge is first determined.
# (Loops count from 1, positions from 0; a question is $a, r_1, r_2$.)

# %%
from IPython.display import Image, display

from loopjax.analysis.multihop import figures, readings, tables


def show(files):
  display(*(Image(filename=file) for file in files))


pictures = workdir / "analysis"
pictures.mkdir(exist_ok=True)
show(figures.draw_lens(readings.logit_lens(question_set, observed), pictures))

# %% [markdown]
# If the bridge can be read out after loop 1 in both graphs, how close is the
# state to its embedding in each? (Table 1b of the paper; the other columns are
# controls.)

# %%
print(tables.cosines(readings.cosines(question_set, observed)))

# %% [markdown]
# ## Fix it
#
# One question about graph B with a wrong answer. `passed_on` is the state after
# loop 1 at the bridge's position, `embed` is $\mathrm{Norm}(W[b])$, and
# `answer` runs the model with the edited state. The token $b$ is the one that
# the state itself decodes to: nothing about the correct answer is used.

# %%
from loopjax.analysis.multihop import interventions

place = next(interventions.places(question_set, model.num_loops))
inputs, last = question_set.inputs[place.rows], question_set.last[place.rows]
states = model.passed_on(inputs, place.loop, place.position)
read = observed.prediction[place.rows, place.loop - 1, place.position]
vectors = model.embed(read, states, "rms")


# %%
def answers(alpha):
  return model.answer(inputs, last, place.loop, place.position, alpha, vectors)


right = question_set.answers[place.rows]
split = np.array(question_set.splits)[question_set.split[place.rows]]
ood = np.char.startswith(split, "test_ood")
wrong_then_right = ood & (answers(0.0) != right) & (answers(1.0) == right)
for i in np.flatnonzero(wrong_then_right)[:1]:
  a, bridge, answer = question_set.entities[place.rows[i]]
  print(f"start {a}, bridge {bridge}, answer {answer}")
  print(f"loop 1 reads {read[i]}; the model answers {answers(0.0)[i]}")
  print(f"with the bridge's embedding put in: {answers(1.0)[i]}")
print(f"so mended: {wrong_then_right[ood].mean():.0%} of the OOD questions")

# %% [markdown]
# ## All questions, at every strength
#
# Figure 2 (right) of the paper, with a control: the embedding of an entity that
# does not occur in the question. The command below draws the same with other
# targets and norms.

# %%
from loopjax.analysis.plots import draw
from loopjax.analysis.multihop import rows as rows_lib

found = interventions.sweep(model, question_set, observed, place)

# %%
figure = draw.new(7, 3.8)
axes = figure.subplots()
for name, color in (("test_id_2", draw.GREEN), ("test_ood_2", draw.RED)):
  for target, dashes in (("argmax", "-"), ("random_entity", ":")):
    line = rows_lib.select(
      found, "intervention", split=name, target=target, norm="rms"
    )
    axes.errorbar(
      [row["alpha"] for row in line],
      [row["accuracy"] for row in line],
      [row["accuracy/standard_error"] for row in line],
      color=color, linestyle=dashes, marker="o", markersize=4,
      label=f"{name}, {target.replace('_', ' ')}",
    )  # fmt: skip
title = "Two-hop questions, with the state after loop 1 moved by equation 3"
draw.tidy(axes, title, r"$\alpha$", "accuracy")
figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=9)
show([draw.save(figure, pictures / "intervention.png")])

# %% [markdown]
# ## Next steps
#
# * `loopjax analysis RUN` does all of this for a run, and also causal patching.
# * DiscoLoop makes the fix part of the model: between the loops it mixes the
#   state with the embedding of the tokens that it decodes to (equations 4 and
#   5). To train it, omit `model.name=looped`; the README has the preset's
#   results for three seeds.
