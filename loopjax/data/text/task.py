"""The text task: next-token prediction in rows of packed documents.

Predictions do not depend on other documents in the row; "documents" gives the
document of each token. It is missing if rows have one document each.
"""

import hashlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from loopjax.data import pipeline
from loopjax.data.text import chat, files, packing, preparation
from loopjax.data.text import tokenizer as tokenizer_lib
from loopjax.data.text.config import Config
from loopjax.data.text.tokenizer import Tokenizer
from loopjax.errors import UserError
from loopjax.losses import tokens as token_losses
from loopjax.types import Array, Batch, Dataset, Output, TaskSpec

TRACES: tuple[str, ...] = ()  # `score` uses no trace.
HEADLINE = ("bits_per_byte", "loss")
_BLOCK = 1024  # Training rows in which each source has its exact share.
_FEW_BYTES = 1e-20  # Avoids a division by zero, and adds nothing to a sum.
_ORDER, _MIXTURE = range(2)  # Streams of random numbers.


def spec(config: Config) -> TaskSpec:
  """Vocabulary, and the length of a row.

  Raises:
    UserError: the tokenizer cannot be read or has too many ids.
  """
  tokenizer = tokenizer_lib.of(config)
  vocab_size = config.vocab_size or tokenizer.num_ids
  if vocab_size < tokenizer.num_ids:
    raise UserError(
      f"task.vocab_size={vocab_size} is too small: {config.tokenizer} has "
      f"{tokenizer.num_ids} ids, including end of document and padding"
    )
  return TaskSpec(
    vocab_size=vocab_size,
    sequence_length=config.sequence_length,
    num_padding_tokens=vocab_size - tokenizer.num_real,
    packs_documents=config.packed,
    predicts_next=True,
  )


def abstract_batch(config: Config, batch_size: int) -> pipeline.Shapes:
  """Shapes and dtypes of a training batch, without making the data."""
  return pipeline.abstract_rows(
    batch_size,
    config.sequence_length,
    integers=("documents",) if config.packed else (),
    floats=("bytes",),
  )


def make_dataset(
  config: Config,
  split: str,
  *,
  batch_size: int,
  seed: int,
  rows: pipeline.Rows | None = None,
) -> Dataset:
  """Batches of a split; sources are packed at their first use.

  Returns:
    Batches of `abstract_batch`'s entries, see `packing.unpack`, and in
    evaluation "valid" bool [b] and "group/source" i32 [b].

  Raises:
    UserError: see `preparation.make`; or a source has no rows in the split; or
      a file of the test split is trained on; or the vocabulary belongs to
      another tokenizer.
  """
  is_test = split == "test" and bool(config.test_files)
  names = config.test_sources if is_test else config.sources
  if not names:
    raise UserError(
      "task.train_files is empty; set it to text files, such as "
      "--config.task.train_files='books/*.txt'"
    )
  tokenizer = tokenizer_lib.of(config)
  _check_vocabulary(config, tokenizer)
  _check_fields(config, names)
  corpora = [preparation.make(config, name, is_test=is_test) for name in names]
  if split == "train" and jax.process_index() == 0:
    _say_splits(config, corpora)
    _say_examples(corpora)
  if split == "train":
    preparation.check_apart(corpora, config.test_sources)
  counts = np.array([one.num_rows(split) for one in corpora])
  for one, count in zip(corpora, counts, strict=True):
    if not count:
      raise UserError(
        f"{one.name}: has no document in the {split} split: documents with the"
        " same prompt, or the same text if they have none, are in one split;"
        " provide more that differ"
      )
  readers = [one.reader(split) for one in corpora]

  def make_rows(source: np.ndarray, row: np.ndarray) -> dict[str, Any]:
    records: list[bytes] = [b""] * len(row)
    for number, reader in enumerate(readers):
      places = np.flatnonzero(source == number)
      found = reader.__getitems__(row[places].tolist()) if len(places) else []
      for place, record in zip(places.tolist(), found, strict=True):
        records[place] = record
    return _unpacked(config, tokenizer, records)

  ends = np.cumsum(counts)

  def make_any(examples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    source = np.searchsorted(ends, examples, "right")
    return source, examples - (ends - counts)[source]

  def make_training(positions: np.ndarray) -> dict[str, Any]:
    return make_rows(*mixed(config.mixture, counts, seed, positions))

  def make_evaluation(places: np.ndarray, _: np.ndarray) -> dict[str, Any]:
    # Shuffled: any prefix is a fair sample.
    source, row = make_any(pipeline.shuffled(places, ends[-1], 0))
    return {**make_rows(source, row), "group/source": source.astype(np.int32)}

  if split != "train":
    batches = pipeline.evaluation_batches(
      make_evaluation, int(ends[-1]), batch_size, rows
    )
  elif config.mixture:
    batches = pipeline.stream(make_training, batch_size, rows)
  else:
    batches = pipeline.training_batches(
      lambda examples, _: make_rows(*make_any(examples)),
      int(ends[-1]),
      batch_size,
      seed,
      rows,
    )
  return Dataset(batches, {"source": names}, _facts(split, corpora))


def _unpacked(
  config: Config, tokenizer: Tokenizer, records: Sequence[bytes]
) -> dict[str, Any]:
  """The batch of records of rows."""
  found = packing.unpack(
    records, config.sequence_length, tokenizer.num_bytes, tokenizer.padding
  )
  if not config.packed:
    del found["documents"]
  return found


def _check_fields(config: Config, names: Sequence[str]) -> None:
  """Raises UserError if fields are named and all files are plain text.

  Beside files that have fields, plain text is read as a whole.
  """
  named = [
    field
    for field in ("prompt_field", "text_field")
    if getattr(config, field) != getattr(Config, field)
  ]
  paths = [path for name in names if named for path in files.find(name)]
  if paths and all(files.kind_of(path) == "text" for path in paths):
    raise UserError(
      f"{paths[0]}: task.{named[0]} needs JSONL, CSV, TSV or parquet"
    )


def _say_splits(config: Config, corpora: Sequence[preparation.Corpus]) -> None:
  """Names the sources whose splits are not chosen only by hash."""
  test_share = 0.0 if config.test_files else config.test_share
  for one in corpora:
    job = one.job
    if job.text_bytes:
      parts = [f"{split} {share:.3g}" for split, share in job.splits.items()]
      how = f"its splits are parts of it in this order: {', '.join(parts)}"
    elif (job.validation, job.test) != (config.validation_share, test_share):
      how = "the validation or test split is a single document"
    else:
      continue
    print(f"{one.name}: has few documents; {how}", flush=True)


def _say_examples(corpora: Sequence[preparation.Corpus]) -> None:
  """Prints a document of each source of prompts or conversations, in full."""
  start, stop = chat.MARKS
  for one in corpora:
    if example := one.facts.get("example"):
      print(
        f"{one.name}: a document, of which {start}what is trained{stop} is"
        f" marked:\n{example}",
        flush=True,
      )


def _check_vocabulary(config: Config, tokenizer: Tokenizer) -> None:
  """Raises UserError if most ids of the vocabulary would never occur.

  Such a vocabulary is valid without data: to describe a model, or to see
  whether it fits a machine.
  """
  if config.vocab_size > 2 * tokenizer.num_ids:
    raise UserError(
      f"task.vocab_size={config.vocab_size} does not match the tokenizer: "
      f"task.tokenizer={config.tokenizer} has {tokenizer.num_ids} ids; set "
      "task.tokenizer to the tokenizer.json of that vocabulary, or "
      "task.vocab_size=0 for this one"
    )


def mixed(
  mixture: tuple[float, ...],
  counts: np.ndarray,
  seed: int,
  positions: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
  """The source and its row at given positions of the training stream.

  In every block of 1024 positions, each source has rows in proportion to its
  weight, in random order; each source has its own epochs.

  Args:
    mixture: weights, with sum 1.
    counts: number of rows of each source, int [sources].
    seed: seed of the order.
    positions: int [b].

  Returns:
    Sources, int [b]; row numbers, int [b].
  """
  edges = np.floor(np.cumsum(mixture) * _BLOCK + 0.5).astype(np.int64)
  shares = np.diff(edges, prepend=0)
  in_order = np.repeat(np.arange(len(mixture)), shares)
  blocks, places = np.divmod(positions, _BLOCK)
  source = np.zeros(len(positions), np.int64)
  row = np.zeros(len(positions), np.int64)
  stream = pipeline.stream_seed(_MIXTURE, seed)
  for block in np.unique(blocks).tolist():
    here = blocks == block
    all_places = np.arange(block * _BLOCK, (block + 1) * _BLOCK)
    order = np.argsort(pipeline.uniforms(stream, all_places, 1)[:, 0])
    drawn = in_order[order]
    # The number of rows of the same source earlier in the block.
    earlier = np.zeros(_BLOCK, np.int64)
    for number in range(len(mixture)):
      mine = drawn == number
      earlier[mine] = np.arange(shares[number])
    source[here] = drawn[places[here]]
    row[here] = block * shares[source[here]] + earlier[places[here]]
  for number, count in enumerate(counts.tolist()):
    mine = np.flatnonzero(source == number)
    epochs, examples = np.divmod(row[mine], count)
    for epoch in np.unique(epochs).tolist():
      now = epochs == epoch
      row[mine[now]] = pipeline.shuffled(
        examples[now], count, _ORDER, seed, number, epoch
      )
  return source, row


def _facts(
  split: str, corpora: list[preparation.Corpus]
) -> dict[str, int | float | str]:
  """Counts of a split over all sources."""
  facts: dict[str, int | float | str] = {}
  for name in (
    "rows",
    "documents",
    "documents_cut",
    "pieces_without_completion",
    "tokens",
    "bytes",
  ):
    facts[f"{split}_{name}"] = sum(one.facts[split][name] for one in corpora)
  for name in ("documents_empty", "documents_skipped"):
    facts[f"{split}_{name}"] = sum(one.facts[name] for one in corpora)
  padding = sum(one.facts[split]["padding"] for one in corpora)
  tokens = sum(one.facts[split]["tokens"] for one in corpora)
  # Checksums of all sources' files and of the settings that determine rows.
  names = "".join(one.folder.name for one in corpora)
  return {
    **facts,
    f"{split}_sha256": hashlib.sha256(names.encode()).hexdigest(),
    f"{split}_examples": facts[f"{split}_rows"],
    f"{split}_padding_share": padding / (padding + tokens),
  }


def score(
  output: Output, batch: Batch
) -> dict[str, Array | tuple[Array, Array]]:
  """Scores of every row and their weights, f32 [B], f32 [B].

  "loss": mean cross-entropy of the predictions that count, in nats per token,
  weighted by the row's tokens; "bits_per_byte": their sum in bits over the
  UTF-8 bytes of their targets, weighted by the row's bytes. Weighted means over
  rows are thus means over the corpus. The end token is predicted too, and has
  no bytes.
  """
  losses, _, weights = token_losses.graded(output, batch)
  nats = jnp.sum(losses * weights, axis=1)
  num_tokens = jnp.sum(weights, axis=1)
  # A row may predict only ends of documents; their bits count.
  num_bytes = jnp.sum(batch["bytes"][:, -losses.shape[1] :], axis=1)
  num_bytes = jnp.maximum(num_bytes, _FEW_BYTES)
  bits = nats / jnp.log(2.0)
  return {
    "loss": (nats / jnp.maximum(num_tokens, 1.0), num_tokens),
    "bits_per_byte": (bits / num_bytes, num_bytes),
  }
