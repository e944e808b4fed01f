"""Work directories with quantised weights, for inference."""

import pathlib
from typing import Any

from loopjax import config as config_lib
from loopjax.errors import UserError
from loopjax.hub import convert
from loopjax.hub.retrofit import read_source
from loopjax.program import tree_size
from loopjax.run import workdir as workdir_lib
from loopjax.run.checkpoints import quantized


def quantize(
  source: pathlib.Path,
  workdir: pathlib.Path,
  *,
  weights: str,
  dtype: str | None = None,
  checkpoint: int | None = None,
) -> dict[str, Any]:
  """Quantises the weights of a model; returns the summary of the result.

  Args:
    source: a run of a causal family, or a folder of the Hub.
    workdir: a directory without a run.
    weights: a key of `quantized.WEIGHTS`.
    dtype: of a folder's other parameters and of its products; bfloat16 if None.
    checkpoint: step of a run; None for the newest.

  Raises:
    UserError: the source cannot be read, is not a causal model or is already
      quantised; nothing is written then.
  """
  workdir_lib.check_new(workdir)
  config, params, folder = read_source(source, checkpoint, dtype or "bfloat16")
  if dtype and folder != source:
    raise UserError(f"--dtype={dtype} has no effect on a run")
  if config_lib.resolve(config).family.reading is None:
    raise UserError(
      f"{source}: model.name={config.model.name!r} does not predict next tokens"
    )
  origin = {
    "quantized": str(source),
    "weights": weights,
    "parameters": tree_size.num_elements(params),
  }
  made = quantized.quantized(params, weights)
  return convert.write_run(workdir, config, made, folder, origin)
