"""The cost of chunked and of plain read-out and cross-entropy.

  python benchmarks/bench_token_loss.py --width=128
  python benchmarks/bench_token_loss.py --num_loops=4 --vocab=49152

Times value and gradient of the mean loss, with the language model's vocabulary
of arXiv 2607.00341 (appendix B) and 4,096 tokens; with several loops, of Ouro's
expected loss over exits (arXiv 2510.25741, section 3.3), which reads out every
token after each loop. Forms take turns in one process under the same
conditions; only ratios within one run are meaningful, on a busy machine ratios
of CPU time on one core (`taskset -c 0`). "Peak" is arguments, outputs and
temporaries of the compiled program.
"""

import json
import pathlib
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from loopjax.loop import exits
from loopjax.losses import exits as exit_losses
from loopjax.losses.tokens import token_loss
from loopjax.run import provenance

sys.path.append(str(pathlib.Path(__file__).parents[1] / "tests"))
import vocabulary_examples

FORMS = {"reference": vocabulary_examples.token_loss, "chunked": token_loss}

_VOCAB = flags.DEFINE_integer("vocab", 129_280, "V.")
_TOKENS = flags.DEFINE_integer("tokens", 4096, "Tokens of a batch.")
_WIDTH = flags.DEFINE_integer("width", 128, "D.")
_DTYPE = flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "Both.")
_LOOPS = flags.DEFINE_integer("num_loops", 1, "K; above 1, the loss of exits.")
_CALLS = flags.DEFINE_integer("calls", 3, "Timed calls of each; 0 for none.")
_OPTIONS = ("vocab", "tokens", "width", "dtype", "num_loops")


def main(argv):
  del argv
  dtype = jnp.dtype(_DTYPE.value)
  keys = jax.random.split(jax.random.key(0), 4)
  shape = (_LOOPS.value, 4, _TOKENS.value // 4)
  operands = (
    jax.random.normal(keys[0], (*shape, _WIDTH.value), dtype),
    0.1 * jax.random.normal(keys[1], (_VOCAB.value, _WIDTH.value), dtype),
    jax.random.normal(keys[3], shape),
    jax.random.randint(keys[2], shape[1:], 0, _VOCAB.value),
  )
  forms = {name: compiled(form, operands) for name, form in FORMS.items()}
  seconds = {form: [] for form in forms}
  busy = {form: [] for form in forms}
  for turn in range(_CALLS.value + 1 if _CALLS.value else 0):
    for form, program in forms.items():
      start = time.perf_counter(), time.process_time()
      jax.block_until_ready(program(*operands))
      if turn:  # The first warms up.
        seconds[form].append(time.perf_counter() - start[0])
        busy[form].append(time.process_time() - start[1])
  rows = []
  for form, program in forms.items():
    memory = program.memory_analysis()
    temporaries = memory.temp_size_in_bytes
    others = memory.argument_size_in_bytes + memory.output_size_in_bytes
    row = {"form": form, "peak_mib": (temporaries + others) / 2**20}
    row["temporaries_mib"] = temporaries / 2**20
    if seconds[form]:
      row["ms"] = 1e3 * float(np.median(seconds[form]))
      row["cpu_ms"] = 1e3 * float(np.median(busy[form]))
    rows.append(row)
  options = {name: flags.FLAGS[name].value for name in _OPTIONS}
  report = {"rows": rows, **options, **provenance.environment()}
  print(json.dumps(report, indent=2))


def compiled(form, operands):
  """Value and gradient of the mean loss, or of the expected loss over exits."""

  def loss(hidden, table, gate, targets):
    every = jnp.broadcast_to(targets, hidden.shape[:-1])
    losses = form(hidden, table, every)
    if _LOOPS.value == 1:
      return jnp.mean(losses)
    log_chance = exits.log_distribution(gate)
    batch = {"weights": jnp.ones(targets.shape)}
    return exit_losses.expected(losses, log_chance, batch, 0.05)[0]

  run = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))
  return run.lower(*operands).compile()


if __name__ == "__main__":
  app.run(main)
