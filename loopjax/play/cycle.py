"""Answers of a trained model about a cycle, after every pass over its edges.

The page asks for every node which one comes 1, 2, 4, ... steps later, as Depo
does in evaluation (`loopjax.data.depo`). A model that sleeps reads the edges in
windows, which it drops before a question; the answer after k passes is computed
with k passes over every window.
"""

import functools
import string
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from loopjax import config as config_lib
from loopjax.data.depo import task as depo
from loopjax.data.depo.task import Config
from loopjax.errors import UserError
from loopjax.models.sleep import config as sleep
from loopjax.play.page import Inspection, Inspector, Source, facts
from loopjax.saved import trained
from loopjax.types import Array

Word = tuple[int, ...]  # Token ids of a node's name.


class Cycle(NamedTuple):
  """Nodes in the order of the cycle, and the order in which edges are read.

  Attributes:
    nodes: names.
    edges: place of each edge's first node among the nodes.
  """

  nodes: list[Word]
  edges: list[int]


def load(source: Source) -> Inspector:
  """The inspector of a run on Depo.

  Raises:
    UserError: names of nodes have more tokens than there are letters.
  """
  settings, config = source.settings, source.settings.task
  assert isinstance(config, Config)  # As the caller has found.
  if config.word_base > len(string.ascii_letters):
    raise UserError(
      f"{source.workdir}: task.word_base={config.word_base} has no view; the"
      f" page writes names in {len(string.ascii_letters)} letters"
    )
  run = trained.read(source.workdir, source.checkpoint)

  @jax.jit
  def forward(params: Any, inputs: Array) -> tuple[Array, Array, Array]:
    model: Any = nnx.merge(run.graphdef, params)
    num = depo.answer_length(config)
    logits = [
      model(inputs, num_loops=k).logits[:, -num:]
      for k in range(1, source.loops + 1)
    ]
    chances = jax.nn.softmax(jnp.stack(logits))  # [K, B, A, V]
    right = jnp.roll(inputs[:, -num:], -1, axis=1)[None, ..., None]
    return (
      jnp.argmax(chances, axis=-1),
      jnp.max(chances, axis=-1),
      jnp.take_along_axis(chances, right, axis=-1)[..., 0],
    )

  inspect = functools.partial(
    _inspect, config, _windows(settings), functools.partial(forward, run.params)
  )
  sleeps = isinstance(settings.model, sleep.Config)
  return Inspector(
    view="cycle",
    facts=facts(source, run.step, sleeps=sleeps, hops=config.eval_hops),
    inspect=inspect,
    random=lambda seed, level: inspect(random_cycle(config, seed)),
  )


def random_cycle(config: Config, seed: int) -> str:
  """A largest cycle of the task, as `parse` reads it."""
  batch = depo.examples(
    config,
    seed,
    np.zeros(1, np.int64),
    np.full(1, config.num_nodes),
    np.ones((1, config.num_queries), np.int64),
  )
  tokens = batch["inputs"][0, : config.context_length]
  words: list[list[int]] = [[]]
  for token in tokens[tokens < config.first_hop].tolist():
    words[-1].append(token)
    if token >= config.word_base:  # The last one of its word.
      words.append([])
  names = [_name(config, word) for word in words[:-1]]
  pairs = zip(names[::2], names[1::2], strict=True)
  return " ".join(f"{source}>{sink}" for source, sink in pairs)


def parse(config: Config, prompt: str) -> Cycle:
  """A cycle from its edges, such as "a>b c>a b>c".

  Raises:
    UserError: a part is not an edge, the edges are not one cycle, or they are
      too many.
  """
  pairs = []
  for part in prompt.split():
    source, arrow, sink = part.partition(">")
    if not arrow:
      raise UserError(f"{part!r} is not an edge; expected the form a>b")
    pairs.append((_word(config, source), _word(config, sink)))
  if not 1 <= len(pairs) <= config.num_nodes:
    raise UserError(
      f"{len(pairs)} edges; a cycle of this task has 1 to {config.num_nodes}"
    )
  after = dict(pairs)
  nodes = [pairs[0][0]]
  while (node := after.get(nodes[-1])) is not None and node not in nodes:
    nodes.append(node)
  if len(nodes) < len(pairs) or node != nodes[0]:
    raise UserError(
      f"the {len(pairs)} edges are not one cycle: from"
      f" {_name(config, nodes[0])!r} they reach {len(nodes)} nodes"
    )
  return Cycle(nodes, [nodes.index(source) for source, _ in pairs])


def rows(config: Config, cycle: Cycle) -> np.ndarray:
  """The inputs of all questions, i32 [hops, nodes, T].

  A question is the first one of its answer chunk, and its answer follows it.
  """
  nodes, num = cycle.nodes, len(cycle.nodes)
  length = config.context_length + depo.answer_length(config)
  inputs = np.full(
    (len(config.eval_hops), num, length), config.padding, np.int32
  )
  context = [
    token
    for at in cycle.edges
    for token in (*nodes[at], *nodes[(at + 1) % num])
  ]
  end = config.context_length
  inputs[..., end - len(context) : end] = context
  for row, hops in zip(inputs, config.eval_hops, strict=True):
    for at, node in enumerate(nodes):
      ask = (config.first_hop - 1 + hops, *node, config.answer)
      asked = (*ask, *nodes[(at + hops) % num])
      row[at, end : end + len(asked)] = asked
  return inputs


def _windows(settings: config_lib.Settings) -> Callable[[int], int]:
  """The window in which a token is read; -1 if it is read with the question."""
  model, spec = settings.model, settings.spec
  if not isinstance(model, sleep.Config):
    return lambda place: -1
  slept = spec.sequence_length - sleep.last_chunk(model, spec)
  return lambda place: place // model.window if place < slept else -1


def _inspect(
  config: Config,
  window_of: Callable[[int], int],
  forward: Callable[[np.ndarray], Any],
  prompt: str,
) -> Inspection:
  """A cycle, and all questions about it.

  Returns:
    "prompt"; "nodes", names in the order of the cycle, n; "edges", the place
    among them of each edge's first node, in the order in which they are read;
    "windows", the window of each edge, -1 for what is read with the question;
    "answers" [K][hops][n], what the model says after each number of passes and
    steps, from each node; "chances", their probabilities, and "right", those of
    the right answers, in thousandths. Before the second token of an answer the
    model has read the first one, as in evaluation.
  """
  cycle = parse(config, prompt)
  num = len(cycle.nodes)
  inputs = rows(config, cycle)
  # One program for cycles of all sizes.
  room = np.zeros(
    (len(inputs), config.num_nodes - num, inputs.shape[2]), np.int32
  )
  padded = np.concatenate([inputs, room + config.padding], axis=1)
  found = jax.device_get(forward(padded.reshape(-1, inputs.shape[2])))
  said, chance, right = (
    x.reshape(len(x), *padded.shape[:2], x.shape[-1]) for x in found
  )

  def of_answers(value: Callable[[tuple[int, ...], slice], Any]) -> list:
    """A value of every answer, from its place and the tokens before its own."""

    def of_answer(k: int, hop: int, at: int) -> Any:
      sink = cycle.nodes[(at + config.eval_hops[hop]) % num]
      start = 1 + len(cycle.nodes[at])
      return value((k, hop, at), slice(start, start + len(sink)))

    return [
      [
        [of_answer(k, hop, at) for at in range(num)]
        for hop in range(len(inputs))
      ]
      for k in range(len(said))
    ]

  def product(chances: np.ndarray) -> list:
    return of_answers(
      lambda place, tokens: round(1000 * float(chances[place][tokens].prod()))
    )

  names = [_name(config, node) for node in cycle.nodes]
  sizes = [
    len(cycle.nodes[at]) + len(cycle.nodes[(at + 1) % num])
    for at in cycle.edges
  ]
  first = config.context_length - sum(sizes)
  places = first + np.cumsum([0, *sizes[:-1]])
  return {
    "prompt": " ".join(
      f"{names[at]}>{names[(at + 1) % num]}" for at in cycle.edges
    ),
    "nodes": names,
    "edges": cycle.edges,
    "windows": [window_of(place) for place in places.tolist()],
    "answers": of_answers(
      lambda place, tokens: _name(config, said[place][tokens].tolist())
    ),
    "chances": product(chance),
    "right": product(right),
  }


def _word(config: Config, name: str) -> Word:
  """Token ids of a node's name."""
  letters = string.ascii_letters[: config.word_base]
  least, most = config.min_word, config.max_word
  if not least <= len(name) <= most or set(name) - set(letters):
    number = f"{least}" if least == most else f"{least} to {most}"
    raise UserError(
      f"{name!r} is not the name of a node; use {number} of {letters}"
    )
  ids = [letters.index(letter) for letter in name]
  return (*ids[:-1], ids[-1] + config.word_base)


def _name(config: Config, tokens: list[int] | Word) -> str:
  """The text of tokens: a name's letters, or what cannot be one."""
  base = config.word_base
  text = "".join(
    (string.ascii_letters[token % base] if token < 2 * base else "?")
    + " " * (token >= base)  # It ends a name.
    for token in tokens
  )
  return text.removesuffix(" ") if text.endswith(" ") else f"{text}…"
