"""Cache sizes of models, in bytes.

  python -m loopjax.analysis.memory --config=FILE[:preset] [--tokens=32768]
  python -m loopjax.analysis.memory

The first command prints a table of the cache kinds of a config's family; the
second, table 2 of MELT (arXiv 2605.07721) beside the paper's numbers. All sizes
are of the buffers of `empty_cache`, found without allocating them. MB and
GB are powers of ten, as in the paper.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from loopjax import checks
from loopjax import config as config_lib
from loopjax import program as program_lib
from loopjax.commands import command_line, document
from loopjax.errors import UserError, leave, one_line_errors
from loopjax.program import state as state_lib

# Inconsistencies within the paper's table.
SLIPS = """\
Where the paper's numbers differ (it prints 6.29, 25.17 and 3.67 GB for 32k, and
totals of 9.49, 27.97 and 7.07 GB):
- Its column for 32,768 tokens uses 32,000.
- Its totals add the cache to 2 bytes for 1.6, 1.4 and 1.7 billion parameters,
  not to the model memory in the same row, which gives 9.56, 28.04 and 7.11 GB.
- Qwen3-1.7B shares keys and values in groups of queries' heads (8 of 16), not
  among all (MQA).
- Fewer bytes are stored, but not fewer read: each loop reads the cache again,
  whatever its kind.
"""


class Size(NamedTuple):
  """Memory for one kind of cache, in bytes.

  Attributes:
    kind: a cache kind of the family.
    by_token: cache memory per token of text.
    by_row: cache memory per row of the batch, for any length of the text.
    parameters: memory of the model's parameters.
  """

  kind: str
  by_token: int
  by_row: int
  parameters: int

  def cache(self, num_tokens: int) -> int:
    """Cache memory of a text with this number of tokens, in bytes."""
    return self.by_token * num_tokens + self.by_row


def sizes(settings: config_lib.Settings) -> list[Size]:
  """Sizes of every kind of cache that a config's family has."""
  reading = settings.family.reading
  if reading is None:
    raise UserError(
      f"model.name={settings.model_name!r} does not predict next tokens and "
      "has no cache"
    )
  _, params = program_lib.abstract_model(settings)
  total = state_lib.num_bytes(params)
  return [
    Size(kind, *program_lib.cache_bytes(settings, kind), total)
    for kind in reading.caches
  ]


@one_line_errors
def main(argv: Sequence[str] | None = None) -> int:
  """Prints the table; returns the exit status."""
  parser = command_line.ConfigParser(
    "python -m loopjax.analysis.memory", __doc__ or ""
  )
  parser.add_argument(
    "--tokens", type=int, metavar="N", help="length of a text [the config's]"
  )
  options = parser.parse_config(argv)
  if options.workdir:
    raise UserError("--workdir has no effect: nothing is written")
  if options.config is None:
    if options.tokens is not None:
      raise UserError(f"--tokens={options.tokens} needs --config")
    print(table_2())
    return 0
  checks.flags_at_least(options, tokens=1)
  settings = config_lib.resolve(options.config)
  print(of_config(settings, options.tokens or settings.spec.sequence_length))
  return 0


def of_config(settings: config_lib.Settings, num_tokens: int) -> str:
  """A table of the cache kinds of a config's family."""
  lines = [
    ("cache", "B/token", "B/text", f"MB for {num_tokens:,}", "of the first")
  ]
  table_sizes = sizes(settings)
  for size in table_sizes:
    share = size.cache(num_tokens) / table_sizes[0].cache(num_tokens)
    lines.append(
      (
        size.kind,
        f"{size.by_token:,}",
        f"{size.by_row:,}",
        f"{size.cache(num_tokens) / 1e6:,.3f}",
        f"{share:.3f}",
      )
    )
  return (
    f"{settings.model_name}, {settings.eval_loops} loops,"
    f" {table_sizes[0].parameters / 1e6:,.3f} MB of parameters"
    f"\n{document.aligned(lines, 1)}"
  )


_OURO = {
  "width": 2048, "num_layers": 24, "num_heads": 16, "mlp": "swiglu",
  "mlp_ratio": 2.75, "norm_order": "branch", "num_loops": 4, "tied": False,
  "exit_gate": "unused",
}  # fmt: skip
_QWEN = {
  **_OURO, "num_layers": 28, "num_loops": 1, "num_key_value_heads": 8,
  "mlp_ratio": 3.0, "norm_order": "pre", "qk_norm": True, "tied": True,
  "exit_gate": "none",
}  # fmt: skip


def published(
  family: str, model: Mapping[str, object], vocab_size: int = 49_152
) -> config_lib.Settings:
  """Settings of a published model in bfloat16; allocates no parameters."""
  config = config_lib.make(family, "text")
  values = {f"model.{name}": value for name, value in model.items()}
  others = {
    "model.precision": "bfloat16_params",
    "task.vocab_size": vocab_size,
    "optim.warmup_steps": 0,
    "eval.depth_factor": 0,
  }
  config_lib.override(config, {**values, **others})
  return config_lib.resolve(config)


def ouro() -> config_lib.Settings:
  """Ouro-1.4B (arXiv 2510.25741)."""
  return published("looped", _OURO)


def table_2() -> str:
  """MELT's table 2, from our buffers and parameters."""
  melt = {**_OURO, "distill": "none", "chunk_size": 512}
  rows = (
    ("MELT-1.6B", published("melt", melt)),
    ("Ouro-1.4B", ouro()),
    ("Qwen3-1.7B", published("looped", _QWEN, 151_936)),
  )
  lines = [("", "MB/token", "model GB", "32,000", "32,768", "total GB")]
  for name, settings in rows:
    size = sizes(settings)[0]
    cached = size.by_token * 32_768
    lines.append(
      (
        name,
        f"{size.by_token / 1e6:.6f}",
        f"{size.parameters / 1e9:.3f}",
        f"{size.by_token * 32_000 / 1e9:.2f}",
        f"{cached / 1e9:.2f}",
        f"{(cached + size.parameters) / 1e9:.2f}",
      )
    )
  return f"{document.aligned(lines, 1)}\n\n{SLIPS}"


if __name__ == "__main__":
  leave(main())
