"""Training steps of MELT and of the looped model from which it starts.

  python benchmarks/bench_melt.py

The looped model trains on whole rows; MELT trains chunk by chunk without a
teacher, with a teacher, and with alignment to the teacher's attention (phase
2); or it recomputes every row as in decoding, after chunks or after the whole
row. All have the preset's sizes. Steps are complete, with the optimizer, on
random tokens. Programs alternate in one process under the same conditions; only
ratios within one run are meaningful. Columns:

  ms      median of a step
  speed   tokens per second, as a multiple of the looped model's
  temp    temporaries of the compiled program, in MiB
"""

import json
import time

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from loopjax import config as config_lib
from loopjax import program as program_lib
from loopjax.config import presets
from loopjax.run import provenance

_PRESET = flags.DEFINE_string("preset", "tiny", "Of configs/lm_melt.py.")
_CALLS = flags.DEFINE_integer("calls", 5, "Timed steps of each form.", 1)
_BATCH = flags.DEFINE_integer("batch", 1, "Rows of a step.", 1)
_TOKENS = flags.DEFINE_integer("tokens", 1024, "Of a row.", 1)
_CHUNK = flags.DEFINE_integer("chunk", 128, "Tokens of a chunk.", 1)
_FORMS = flags.DEFINE_integer("forms", 4, "The first so many rows.", 2, 4)

FORMS = {
  "looped": {"model.name": "looped", "optim.rates": ()},
  "melt": {"model.distill": "none"},
  "melt, taught": {"model.distill": "all"},
  "melt, taught and aligned": {
    "model.distill": "all", "model.align_weight": 0.1,
  },
}  # fmt: skip


def main(argv):
  del argv
  forms = list(FORMS.items())[: _FORMS.value]
  steps = {name: step_of(changes) for name, changes in forms}
  seconds = {name: [] for name in steps}
  for turn in range(_CALLS.value + 1):  # The first warms up.
    for name, (call, _) in steps.items():
      start = time.perf_counter()
      call()
      if turn:
        seconds[name].append(time.perf_counter() - start)
  rows = {}
  base = float(np.median(seconds["looped"]))
  print(f"{'':26}{'ms':>9}{'speed':>7}{'temp':>7}")
  for name, (_, temporaries) in steps.items():
    median = float(np.median(seconds[name]))
    rows[name] = {
      "ms": 1e3 * median,
      "speed": base / median,
      "temp_mib": temporaries / 2**20,
    }
    row = rows[name]
    print(f"{name:26}{row['ms']:9.1f}{row['speed']:7.2f}{row['temp_mib']:7.0f}")
  names = ("preset", "calls", "batch", "tokens", "chunk")
  options = {name: flags.FLAGS[name].value for name in names}
  print(json.dumps({**rows, **options, **provenance.environment()}, indent=2))


def settings_of(changes):
  """Settings of a form, or of its teacher."""
  own = f"model.chunk_size={_CHUNK.value}"
  if name := changes.get("model.name"):
    own = f"model.name={name}"
  config = presets.read("configs/lm_melt.py")["get_config"](
    f"{_PRESET.value},{own}"
  )
  learns = changes.get("model.distill", "none") != "none"
  size = {
    "task.sequence_length": _TOKENS.value, "run.batch_size": _BATCH.value,
    "run.num_microbatches": 1, "eval.batch_size": _BATCH.value,
    "run.teacher": "looped" if learns else "",
  }  # fmt: skip
  rest = {k: v for k, v in changes.items() if k != "model.name"}
  config_lib.override(config, {**size, **rest})
  return config_lib.resolve(config)


def step_of(changes):
  """(a training step that waits for its result, bytes of temporaries)."""
  settings = settings_of(changes)
  teacher = settings_of(FORMS["looped"]) if settings.run.teacher else None
  program = program_lib.make_program(settings, teacher=teacher)
  state, teacher_params = drawn(
    (program.abstract_state, program.abstract_teacher)
  )
  shapes = settings.task_module.abstract_batch(settings.task, _BATCH.value)
  tokens = settings.spec.vocab_size - settings.spec.num_padding_tokens

  def filled(shape):
    """Bytes of temporaries of one step."""
    random = np.random.default_rng(0)
    return random.integers(0, tokens, (1, *shape.shape)).astype(shape.dtype)

  batch = {name: filled(shape) for name, shape in shapes.items()}
  for name in {"weights", "documents"} & batch.keys():
    batch[name] = np.ones_like(batch[name])
  compiled = program.train.lower(state, batch, teacher_params).compile()
  kept = [state]

  def call():
    kept[0], metrics = compiled(kept[0], batch, teacher_params)
    jax.block_until_ready((kept[0], metrics))

  return call, compiled.memory_analysis().temp_size_in_bytes


def drawn(shapes):
  """Constant parameters instead of compiling an initialiser."""
  random = np.random.default_rng(0)

  def one(shape):
    if jnp.issubdtype(shape.dtype, jax.dtypes.prng_key):
      return jax.random.key(0)
    if jnp.issubdtype(shape.dtype, jnp.floating):
      values = 0.05 * np.abs(random.normal(size=shape.shape))
      return jnp.asarray(values, shape.dtype)
    return jnp.zeros(shape.shape, shape.dtype)

  return jax.tree.map(one, shapes)


if __name__ == "__main__":
  app.run(main)
