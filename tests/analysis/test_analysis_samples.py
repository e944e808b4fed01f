"""The page of samples: what a model generates after a prompt."""

import html
import re

import grain
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from loopjax import config as config_lib
from loopjax import program as program_lib
from loopjax.analysis import evaluated as evaluated_lib
from loopjax.analysis import text as text_figures
from loopjax.types import Dataset

END = 256


def _view(directory, name="looped"):
  config = config_lib.make(name, "text")
  config_lib.override(
    config,
    {
      "task.train_files": "made:arithmetic", "task.sequence_length": 16,
      "model.width": 16, "model.num_layers": 1, "model.num_heads": 2,
      "model.num_loops": 2, "eval.batch_size": 8, "eval.depth_factor": 0,
      "optim.warmup_steps": 1,
    },
  )  # fmt: skip
  settings = config_lib.resolve(config)
  graphdef, _ = program_lib.abstract_model(settings)
  model = settings.family.Model(
    settings.model, settings.spec, settings.loop, rngs=nnx.Rngs(params=0)
  )
  params = nnx.to_pure_dict(nnx.state(model))
  table = params["token_embedding"]["embedding"]
  params["token_embedding"]["embedding"] = 20 * table
  text = np.frombuffer(b"12+30=42;7*8=56;" * 8, np.uint8).reshape(8, 16)
  batch = {
    "inputs": text.astype(np.int32), "targets": text.astype(np.int32),
    "weights": np.ones((8, 16), np.float32),
    "documents": np.ones((8, 16), np.int32), "valid": np.arange(8) != 1,
  }  # fmt: skip
  return evaluated_lib.evaluate_model(
    settings,
    graphdef,
    params,
    Dataset(grain.MapDataset.source([batch]), {}, {}),
    [],
    directory,
  )


@pytest.mark.long
def test_the_likeliest_text_is_what_the_model_says(tmp_path):
  evaluated = _view(tmp_path)
  (path,) = text_figures.draw_samples(evaluated)
  text = path.read_text()
  blocks = [
    html.unescape(found)
    for found in re.findall(r"<pre><code>(.*?)</code></pre>", text, re.DOTALL)
  ]
  assert text.count("<h2 ") == 4 and len(blocks) == 16
  model = nnx.merge(evaluated.graphdef, evaluated.params)
  tokens = list(b"12+30=42")
  for _ in range(8):
    logits = model(jnp.asarray([tokens]), num_loops=2).logits
    tokens.append(int(jnp.argmax(logits[0, -1, :257])))
  written = tokens[8:]
  if END in written:
    written = written[: written.index(END)]
  assert blocks[0].rstrip("\n") == "12+30=42"
  assert blocks[1].rstrip("\n") == ";7*8=56;"
  assert blocks[2].rstrip("\n") == bytes(written).decode(errors="replace")
  assert blocks[2] != blocks[3]


def test_the_first_document_of_a_row_is_divided_in_the_middle():
  batch = {
    "inputs": np.array([[1, 2, 3, 4, 5, 6], [1, 2, 3, 9, 9, 9],
                        [7, 1, 2, 3, 4, 5], [9, 9, 9, 9, 9, 9]]),
    "documents": np.array([[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0],
                           [1, 2, 2, 2, 2, 2], [1, 1, 1, 1, 1, 1]]),
  }  # fmt: skip
  expected = [((1, 2), (3, 4, 5, 6)), ((1,), (2, 3)), ((7,), ())]
  assert evaluated_lib.halves(batch, 2, 9) == expected
  del batch["documents"]
  expected = [((1, 2, 3), (4, 5, 6)), ((1,), (2, 3)), ((7, 1, 2), (3, 4, 5))]
  assert evaluated_lib.halves(batch, 3, 9) == expected
