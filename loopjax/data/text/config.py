"""The settings of the text task."""

import dataclasses
import glob
import math
import os

from loopjax import checks
from loopjax.errors import UserError

SEPARATOR = "\n\n"
_MIN_WEIGHT = 1 / 512  # Per source: two rows per block of `task.mixed`.


@dataclasses.dataclass(frozen=True)
class Config:
  """Sources of text, the tokenizer, and the length of rows.

  A source is a file, a pattern (`books/*.txt`) or hf://OWNER/NAME/FILE, a file
  or a pattern of a dataset on the Hugging Face Hub. `.jsonl`, `.ndjson` and
  `.json` files contain one JSON object per line, `.csv` (with commas), `.tsv`
  (with tabs) and `.parquet` files tables, all others plain text, which is split
  at blank lines into documents of about 8 KiB. All except parquet may be
  compressed with gzip or Zstandard.

  Attributes:
    train_files: sources, separated by commas.
    test_files: sources of the test split; empty to use a share of train_files.
    mixture: share of each source in the training rows, with sum 1; empty for
      shares in proportion to their numbers of rows.
    text_field: in JSONL and tables, the field of the text or conversation. A
      conversation is a list of {"from", "value"} or {"role", "content"}; the
      loss covers the assistant's turns only, without those of "weight" 0
      (OpenThoughts: `conversations`).
    prompt_field: the field of a prompt, which precedes the text and has no loss
      (AceReason: `input`, with `output` as text_field); of a conversation the
      system's message (OpenThoughts: `system`); empty for none.
    separator: what is between a prompt and its text, and between the turns of a
      conversation. With the default, these are written by the chat template
      beside the tokenizer's file, if there is one.
    tokenizer: "bytes", or the path of a `tokenizer.json`.
    end_token: the tokenizer's token for the end of a document and for padding,
      as a published model uses it; empty to add an id for each.
    begin_token: the tokenizer's token at the beginning of documents; empty for
      the end token, as a separator from the previous document.
    add_begin_token: whether prompts begin with it too.
    vocab_size: number of token ids; 0 for the tokenizer's and, without
      end_token, two more, the end of a document and padding.
    sequence_length: tokens per row. Longer documents are split.
    packed: whether a row has several documents, which do not see each other;
      otherwise one, or a part of one, for models that read whole rows.
    validation_share, test_share: fractions of the documents, chosen by the hash
      of their prompt, or of their text if they have none. Where a split would
      have none, plain text is split by position: the last part is the test
      split, the part before it the validation split; of other files, the
      document whose hash is nearest is chosen.
    on_bad_document: "error" stops at a malformed document, "skip" skips it and
      counts it in the summary.
  """

  train_files: str = ""
  test_files: str = ""
  mixture: tuple[float, ...] = ()
  text_field: str = "text"
  prompt_field: str = ""
  separator: str = SEPARATOR
  tokenizer: str = "bytes"
  end_token: str = ""
  begin_token: str = ""
  add_begin_token: bool = True
  vocab_size: int = checks.setting(0, least=0)
  sequence_length: int = checks.setting(1024, least=2)
  packed: bool = True
  validation_share: float = checks.setting(0.05, within="(0, 0.4]")
  test_share: float = checks.setting(0.05, within="(0, 0.4]")
  on_bad_document: str = "error"

  def __post_init__(self) -> None:
    checks.plain_values("task", self)
    checks.one_of("task", self, on_bad_document=("error", "skip"))
    for field in ("text_field", "tokenizer"):
      if not getattr(self, field):
        raise UserError(f"task.{field} is empty")
    if self.test_files:
      checks.without_effect("task", self, "test_files", "test_share")
    for source in self.test_sources:
      if source in self.sources:
        raise UserError(f"task.test_files={source!r} is trained on")
    self._check_mixture()

  def _check_mixture(self) -> None:
    """Raises UserError unless the weights, if any, fit the sources."""
    if not self.mixture:
      return
    if not all(
      type(w) in (int, float) and w >= _MIN_WEIGHT for w in self.mixture
    ):
      raise UserError(
        f"task.mixture={self.mixture} must be numbers of at least"
        f" {_MIN_WEIGHT:.3g}"
      )
    if len(self.mixture) != len(self.sources):
      raise UserError(
        f"task.mixture={self.mixture} has {len(self.mixture)} weights for"
        f" {len(self.sources)} sources of task.train_files"
      )
    if not math.isclose(sum(self.mixture), 1.0, abs_tol=1e-6):
      raise UserError(
        f"task.mixture={self.mixture} sums to {sum(self.mixture):g}, expected 1"
      )

  @property
  def sources(self) -> tuple[str, ...]:
    """The sources of training and validation."""
    return split_sources(self.train_files)

  @property
  def test_sources(self) -> tuple[str, ...]:
    """The sources of the test split, if it has its own."""
    return split_sources(self.test_files)


def split_sources(text: str) -> tuple[str, ...]:
  """The sources listed in a setting.

  Raises:
    UserError: the whole text is a file or a pattern of files.
  """
  if "," in text and glob.glob(os.path.expanduser(text)):
    raise UserError(
      f"{text}: commas separate sources; write ? for one in a file's name"
    )
  return tuple(part.strip() for part in text.split(",") if part.strip())
