"""How often every computation of a program runs."""

from collections import Counter

from loopjax.fit.counts import hlo


def counts(module: hlo.Module) -> tuple[Counter[str], tuple[str, ...]]:
  """Executions of every computation in one call; loops of unknown length.

  Those of fusions and reductions count too, as often as what calls them. Every
  branch of a condition counts as taken, and the contents of a loop of unknown
  length once; the condition of a loop of known length is not evaluated.
  """
  times: Counter[str] = Counter({module.entry: 1})
  unknown = []
  for name in reversed(module.computations):  # Callers first.
    for instruction in module.computations[name].instructions.values():
      if not times[name] or instruction.opcode in (
        "async-update",
        "async-done",
      ):
        continue  # Asynchronous computations count at their start.
      trips, known = 1, None
      if instruction.opcode == "while":
        known = hlo.trip_count(module, name, instruction)
        trips = 1 if known is None else known
        if known is None:
          unknown.append(instruction.op_name or instruction.name)
      for role, callee in instruction.called:
        if role != "condition" or known is None:
          times[callee] += times[name] * trips
  return times, tuple(unknown)


def executed(module: hlo.Module, *, asynchronous: bool = True) -> list[str]:
  """Computations of which every instruction runs by itself, the entry first.

  Others are what a fusion or a reduction applies.

  Args:
    module: the program.
    asynchronous: whether asynchronous ones are among them.
  """
  callers = ["call", "conditional", "while"] + ["async-start"] * asynchronous
  names = [module.entry]
  for name in names:  # The list grows during iteration.
    for instruction in module.computations[name].instructions.values():
      if instruction.opcode in callers:
        names += [c for _, c in instruction.called if c not in names]
  return names
