"""A model's loops as a dynamical system: does its state settle, and in what?

Of the state that passes from loop to loop, of any family (`driver.Watched`):
how far a loop moves it, how one loop maps what is near its end, when the answer
is final, and which positions matter.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from loopjax import config as config_lib
from loopjax import program as program_lib
from loopjax.analysis import evaluated, jacobian
from loopjax.errors import UserError
from loopjax.types import Array

VERDICTS = ("settles", "cycles", "drifts", "undecided")
TOLERANCE = 0.01  # Relative change by a loop at which a state has settled.
_PERIODS = 8  # The longest cycle that is looked for.
_MAX_FLOATS = 2**27  # Of states that are held at once.
_PROBED, _PLACES, _PROBE_LOOPS = 4, 96, 8
_NOISE = 0.1  # Of the RMS of the state at its position.
_OF_EXAMPLE = (
  "spectral_radius", "spectral_radius/error", "singular_value",
  "singular_value/error", "final_after", "token_final_after", "flips", "right",
)  # fmt: skip


class Dynamics(NamedTuple):
  """What the loops of a model do to some examples; loops count from 1.

  `pandas.DataFrame(d.loops)` is a data frame; the records are numbers and text.

  Attributes:
    examples: one record for each example:
      "verdict": "settles", if a loop changes the state by less than `TOLERANCE`
        of its norm (mean of the last eighth of the loops); "cycles", if a
        number of loops, "period", does; "drifts", if the change of the last
        quarter of the loops is not less than 0.9 of that of the quarter before;
        otherwise "undecided": it still becomes smaller.
      "relative_change": of the state by the last loop.
      "spectral_radius", "singular_value": of the Jacobian of one more loop, at
        the last state; each with its "/error".
      "final_after": the loop after which no token that is read out changes, and
        "token_final_after", a mean over tokens; "flips", how often a token
        changes, mean over tokens. UTM's answer, which weighs all loops, may
        have other tokens.
      "right": whether all tokens are right after the last loop.
    loops: one record for each example and loop: "relative_change",
      "cosine_to_last" state, "change_over_period" (over two loops, if the
      example does not cycle), "confidence" of the predicted tokens, "right",
      the share of tokens, and "loss", nats.
    positions: one record for each position of the state: the relative distance
      of the state, and the share of predicted tokens that change, up to eight
      loops after the state in the middle of the loops got noise at this
      position ("noise/state", "noise/answer") or another example's state there
      ("patch/state", "patch/answer"). Empty for a family whose loops run anew
      for each layer, window or chunk.
    num_loops: K.
    trained_loops: as in training.
    has_answers: whether an answer as a whole is right; else tokens count.

  What a family does not read out after each loop, or what has no targets, is
  missing.
  """

  examples: list[dict[str, Any]]
  loops: list[dict[str, Any]]
  positions: list[dict[str, Any]]
  num_loops: int
  trained_loops: int
  has_answers: bool

  def table(self) -> dict[tuple[bool, bool], int]:
    """The number of examples by (settled, right); empty without targets."""
    pairs = [
      (one["verdict"] == "settles", one["right"])
      for one in self.examples
      if "right" in one
    ]
    keys = [(a, b) for a in (True, False) for b in (True, False)]
    return {key: pairs.count(key) for key in keys} if pairs else {}

  def column(self, name: str) -> np.ndarray:
    """Values of the loops' records, [K, B]; empty if they lack it."""
    values = [one[name] for one in self.loops if name in one]
    return np.reshape(np.array(values, float), (-1, self.num_loops)).T

  def lines(self) -> list[str]:
    """What is to be said about it, for a terminal."""
    of: dict[str, list[Any]] = {
      name: [x.get(name) for x in self.examples] for name in self.examples[0]
    }
    counts = {name: of["verdict"].count(name) for name in VERDICTS}
    said = ", ".join(f"{name} {n}" for name, n in counts.items() if n)
    if periods := sorted({x["period"] for x in self.examples if "period" in x}):
      said += f" (periods {', '.join(map(str, periods))})"
    found = [
      f"{len(self.examples)} examples, {self.num_loops} loops (trained with"
      f" {self.trained_loops}): {said}",
      "change of the state by the last loop:"
      f" {_median(of['relative_change'])} of its norm",
    ]
    for name, words in (
      ("spectral_radius", "spectral radius of one more loop"),
      ("singular_value", "its largest singular value"),
    ):
      errors = max(of[f"{name}/error"])
      found.append(f"{words}: {_median(of[name])}, error at most {errors:.2g}")
    if "final_after" in of:
      name = "final_after" if self.has_answers else "token_final_after"
      what = "answer" if self.has_answers else "token"
      found.append(
        f"{what} final after loop: {_median(of[name], '.0f')};"
        f" a token changes {np.mean(of['flips']):.2g} times"
      )
    if self.has_answers and (table := self.table()):
      for settled, name in ((True, "settled"), (False, "not settled")):
        cells = (
          f"{table[settled, right]} {said}"
          for right, said in ((True, "right"), (False, "wrong"))
        )
        found.append(f"{name}: {', '.join(cells)}")
    for name in ("loss", "right"):
      values = self.column(name)
      if values.size:
        loops = sorted({1, self.trained_loops, self.num_loops} | {
          2**n for n in range(self.num_loops.bit_length())
        })  # fmt: skip
        words = "share of tokens right" if name == "right" else "loss, nats"
        found.append(
          f"{words}, by loops: "
          + ", ".join(
            f"{n}: {np.mean(values[n - 1]):.4g}"
            for n in loops
            if n <= self.num_loops
          )
        )
    return found

  def draw(self, path: str | pathlib.Path) -> pathlib.Path:
    """Writes six panels as a PNG; returns its path."""
    from loopjax.analysis.plots import loops  # Matplotlib takes long.

    return loops.draw_dynamics(self, pathlib.Path(path))


def analyse(
  model: Any, batch: Mapping[str, Any], num_loops: int, *, has_answers: bool
) -> Dynamics:
  """Runs a model's loops on some examples.

  Args:
    model: a `loopjax.Model`.
    batch: "inputs" and, if known, "targets", "weights" and "documents", numpy
      arrays [B, T].
    num_loops: K.
    has_answers: see `Dynamics`.
  """
  settings = model.about.settings
  if settings.loop.kernels != "xla":  # Others have only one backward pass.
    loop = dataclasses.replace(settings.loop, kernels="xla")
    graphdef, _ = program_lib.abstract_model(settings._replace(loop=loop))
    model = dataclasses.replace(model, graphdef=graphdef)
  one = {name: x[:1] for name, x in batch.items()}
  shapes = jax.eval_shape(lambda: jacobian.watched(model, one, num_loops)[1])
  floats = 4 * sum(x.size for x in jax.tree.leaves(shapes))  # Copies of them.
  found = evaluated.in_batches(
    lambda rows: _measured(model, rows, num_loops),
    batch,
    min(len(batch["inputs"]), max(_MAX_FLOATS // floats, 1)),
  )
  return Dynamics(
    examples=_examples(found),
    loops=_loops(found),
    positions=_positions(model, batch, num_loops),
    num_loops=num_loops,
    trained_loops=settings.model.num_loops,
    has_answers=has_answers,
  )


def can_run(settings: config_lib.Settings, num_loops: int) -> bool:
  """Whether the model can run this many loops."""
  try:
    config_lib.check_loops(settings, num_loops, "")
  except UserError:
    return False
  return True


def _measured(model: Any, batch: Any, num_loops: int) -> dict[str, Any]:
  """Everything about some examples, arrays [B, ...] by name."""
  settings = model.about.settings
  names = {"prediction", "confidence"}.intersection(settings.family.traces)
  every = settings.family.reads_out_every_loop
  if "targets" in batch and every and every(settings.model):
    names |= {"loss"}
  found, last = _seen(model, batch, num_loops, tuple(sorted(names)))
  # Some families' last loop is unlike the others, so this is one of more.
  more = can_run(settings, num_loops + 2)
  loop = (num_loops, num_loops + 2) if more else (num_loops - 1, num_loops)
  for name, squared in (("spectral_radius", False), ("singular_value", True)):
    krylov = functools.partial(
      jacobian.krylov, model, batch, last, squared=squared, loop=loop
    )
    value, error = jacobian.largest(krylov, jacobian.flat(last), squared)
    found |= {name: value, f"{name}/error": error}
  return found | _lens(jax.device_get(found), batch)


@functools.partial(jax.jit, static_argnames=("num_loops", "names"))
def _seen(
  model: Any, batch: Any, num_loops: int, names: tuple[str, ...]
) -> tuple[dict[str, Array], Any]:
  """Where the state goes, and what is read out; the last state [P, B, ...]."""
  output, states = jacobian.watched(model, batch, num_loops, names)
  by_loop = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), states)
  flat = jax.vmap(jacobian.flat)(by_loop)  # [K, B, n]
  size = jnp.linalg.norm(flat, axis=-1)
  products = jnp.einsum("kbn,bn->kb", flat, flat[-1], precision="highest")
  found = {"cosine_to_last": (products / (size * size[-1:])).T}
  changes = []
  for period in range(1, min(_PERIODS, num_loops - 1) + 1):
    change = jnp.linalg.norm(flat[period:] - flat[:-period], axis=-1)
    change = change / size[period:]
    nothing = jnp.full((period, len(change[0])), jnp.nan)
    changes.append(jnp.concatenate([nothing, change]))
  found["changes"] = jnp.stack(changes).transpose(2, 0, 1)  # [B, periods, K]
  for name in names:
    found[name] = jnp.swapaxes(output.trace[name], 0, 1)
  found["answer"] = jnp.argmax(output.logits, axis=-1)
  return found, jax.tree.map(lambda x: x[:, -1], states)


def _lens(found: Mapping[str, Any], batch: Any) -> dict[str, Any]:
  """What tokens say after each loop, in the end, and how often they change."""
  answer = found["answer"]
  lens: dict[str, Any] = {}
  weights = np.ones(batch["inputs"].shape, np.float32)
  weights = batch.get("weights", weights)[:, -answer.shape[1] :] > 0
  shares = weights / np.maximum(weights.sum(axis=1, keepdims=True), 1)
  if "targets" in batch:
    targets = batch["targets"][:, -answer.shape[1] :]
    lens["right"] = np.all((answer == targets) | ~weights, axis=1)
  if "prediction" not in found:
    return lens
  shown = found["prediction"][..., -answer.shape[1] :]  # [B, K, S]
  num_loops = shown.shape[1]
  other = shown != shown[:, -1:]
  after = num_loops - np.argmax(other[:, ::-1], axis=1)
  after = np.where(other.any(axis=1), after + 1, 1) * weights
  flips = np.sum(shown[:, 1:] != shown[:, :-1], axis=1)
  lens |= {
    "final_after": np.max(after, axis=1),
    "token_final_after": np.sum(after * shares, axis=1),
    "flips": np.sum(flips * shares, axis=1),
  }
  by_loop = {
    name: found[name] for name in ("confidence", "loss") if name in found
  }
  if "targets" in batch:
    by_loop["right"] = shown == targets[:, None]
  for name, values in by_loop.items():
    values = values[..., -answer.shape[1] :]
    lens[f"{name}_by_loop"] = np.sum(values * shares[:, None], axis=-1)
  return lens


def _verdict(changes: np.ndarray) -> tuple[str, int]:
  """A verdict and the period of a cycle, from changes [periods, K]."""
  num_loops = changes.shape[1]
  tail = max(num_loops // 8, 1)
  last = np.mean(changes[:, -tail:], axis=1)
  if last[0] < TOLERANCE:
    return "settles", 0
  if np.any(last < TOLERANCE):
    return "cycles", int(np.argmax(last < TOLERANCE)) + 1
  quarter = num_loops // 4
  if quarter < 2:
    return "undecided", 0
  now = np.mean(changes[0, -quarter:])
  before = np.mean(changes[0, -2 * quarter : -quarter])
  return ("undecided" if now < 0.9 * before else "drifts"), 0


def _examples(found: Mapping[str, Any]) -> list[dict[str, Any]]:
  records = []
  for b, changes in enumerate(found["changes"]):
    verdict, period = _verdict(changes)
    record: dict[str, Any] = {"example": b, "verdict": verdict}
    if period:
      record["period"] = period
    record["relative_change"] = float(changes[0, -1])
    names = [name for name in _OF_EXAMPLE if name in found]
    records.append(record | {name: found[name][b].item() for name in names})
  return records


def _loops(found: Mapping[str, Any]) -> list[dict[str, Any]]:
  records = []
  suffix = "_by_loop"
  for b, changes in enumerate(found["changes"]):
    period = _verdict(changes)[1] or min(2, len(changes))
    columns = {
      "relative_change": changes[0],
      "change_over_period": changes[period - 1],
      "cosine_to_last": found["cosine_to_last"][b],
      **{
        name.removesuffix(suffix): x[b]
        for name, x in found.items()
        if name.endswith(suffix)
      },
    }
    for k in range(changes.shape[1]):
      values = {name: float(x[k]) for name, x in columns.items()}
      records.append(
        {"example": b, "loop": k + 1}
        | {name: x if np.isfinite(x) else None for name, x in values.items()}
      )
  return records


def _positions(
  model: Any, batch: Mapping[str, Any], num_loops: int
) -> list[dict[str, Any]]:
  """See `Dynamics.positions`."""
  settings = model.about.settings
  batch = {name: x[:_PROBED] for name, x in batch.items()}
  shapes = jax.eval_shape(lambda: jacobian.watched(model, batch, num_loops)[1])
  leaves = jax.tree.leaves(shapes)
  if {x.ndim for x in leaves} != {5} or len({x.shape[:4] for x in leaves}) > 1:
    return []
  pieces, _, rows, length = leaves[0].shape[:4]
  if pieces > 1:
    return []
  places = np.unique(np.linspace(0, length - 1, min(length, _PLACES)).round())
  places = places.astype(np.int32)
  names = tuple({"prediction"}.intersection(settings.family.traces))
  values = jax.device_get(_probes(model, batch, places, num_loops, names))
  memory = settings.family.num_memory_tokens
  before = memory(settings.model) if memory else 0
  kinds = ("noise", "patch") if rows > 1 else ("noise",)
  return [
    {"position": int(place) - before}
    | {
      f"{kind}/{name}": float(values[name][i, j])
      for j, kind in enumerate(kinds)
      for name in ("state", "answer")
    }
    for i, place in enumerate(places)
  ]


@functools.partial(jax.jit, static_argnames=("num_loops", "names"))
def _probes(
  model: Any,
  batch: Any,
  places: Array,
  num_loops: int,
  names: tuple[str, ...],
) -> dict[str, Array]:
  """Relative distances and changed shares, [places, 2], noise and patch."""
  first = max(num_loops // 2, 1)
  loops = range(first, min(first + _PROBE_LOOPS, num_loops))
  _, states = jacobian.watched(model, batch, num_loops)
  middle = jax.tree.map(lambda x: x[:, first - 1], states)  # [1, B, S, D]

  def after(state: Any) -> tuple[Array, Array]:
    edit = jacobian.from_state(state, first, num_loops)
    output, states = jacobian.watched(
      model, batch, num_loops, names, edit, loops
    )
    shown = jnp.argmax(output.logits, axis=-1)
    if names:
      shown = output.trace[names[0]][-1]
    return jacobian.flat(jax.tree.map(lambda x: x[:, -1], states)), shown

  end, said = after(middle)

  def probe(place: Array, patch: Array) -> dict[str, Array]:
    def changed(x: Array) -> Array:
      size = jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True))
      key = jax.random.fold_in(jax.random.key(0), place)
      noise = _NOISE * size * jax.random.normal(key, x.shape, x.dtype)
      new = jnp.where(patch, jnp.roll(x, 1, axis=1), x + noise)
      here = jnp.arange(x.shape[2])[None, None, :, None] == place
      return jnp.where(here, new, x)

    flat, shown = after(jax.tree.map(changed, middle))
    distance = jnp.linalg.norm(flat - end, axis=1)
    size = jnp.linalg.norm(end, axis=1)
    return {
      "state": jnp.mean(distance / size),
      "answer": jnp.mean((shown != said).astype(jnp.float32)),
    }

  def both(place: Array) -> dict[str, Array]:
    return jax.lax.map(
      functools.partial(probe, place), jnp.array([False, True])
    )

  return jax.lax.map(both, places)


def _median(values: Sequence[Any], form: str = ".3g") -> str:
  """The median, and the range."""
  low, middle, high = (
    format(x, form) for x in np.quantile(np.asarray(values), (0, 0.5, 1))
  )
  return f"{middle} ({low} to {high})"
