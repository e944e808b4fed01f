"""Reads and solves word problems, knowing nothing but their text."""

import collections
import dataclasses
import re

NAME = r"(?:the|all) [a-z]+ in [A-Z][a-z]+"
NUMBER = r"[1-9]\d{0,2}"
STATEMENT = re.compile(
  rf"({NAME}) equal (?:({NUMBER})|(something)"
  rf"|({NAME}) (plus|times) ({NUMBER})"
  rf"|({NAME}) minus ({NAME})"
  rf"|({NAME}(?: plus {NAME}){{0,2}})) \."
)


@dataclasses.dataclass
class Problem:
  """What a text says.

  Attributes:
    asked: name.
    rules: by name ("number", value), ("unknown",), ("plus" or "times", name,
      value), ("minus", name, name) or ("sum", names ...).
    given: totals of which a number is said.
    members: items by the total that counts them.
  """

  asked: str
  rules: dict
  given: dict
  members: dict


def read(lines):
  """Sentences in any order; every one must be understood."""
  asked, rules, given, everything = None, {}, {}, None
  for line in lines:
    if match := re.fullmatch(rf"how many are ({NAME}) \?", line):
      assert asked is None
      asked = match[1]
    elif match := re.fullmatch(r"only ([a-z]+) named here count \.", line):
      everything = match[1]
    else:
      match = STATEMENT.fullmatch(line)
      assert match, line
      name, number, unknown, one, how, by, large, small, parts = match.groups()
      assert name not in rules and name not in given
      if name.startswith("all"):
        given[name] = int(number)
      elif number:
        rules[name] = ("number", int(number))
      elif unknown:
        rules[name] = ("unknown",)
      elif how:
        rules[name] = (how, one, int(by))
      elif large:
        rules[name] = ("minus", large, small)
      else:
        rules[name] = ("sum", *parts.split(" plus "))
  members = collections.defaultdict(list)
  for name in rules:
    place = name.split(" in ")[1]
    members[f"all {everything} in {place}"].append(name)
  return Problem(asked, rules, given, members)


def operands(problem, name):
  """Names that this one is made of."""
  if name.startswith("all"):
    return problem.members[name]
  return [part for part in problem.rules[name][1:] if isinstance(part, str)]


def needed(problem):
  """Names that the answer needs: all below what is given or asked."""
  assert len(problem.given) <= 1
  found = list(problem.given) or [problem.asked]
  for name in found:
    found += [part for part in operands(problem, name) if part not in found]
  return found


def num_operations(problem):
  """Edges into the needed quantities; something unknown is a constant."""
  return sum(
    len(operands(problem, name))
    or 1  # A constant that stands alone, or beside another quantity.
    for name in needed(problem)
  ) + sum(
    problem.rules.get(name, "?")[0] in ("plus", "times")
    for name in needed(problem)
  )


def solve(problem):
  """Every quantity as slope * x + offset, then x from the given total.

  Returns:
    Values by name. There is no other solution: quantities are computed one by
    one, and the slope of the given total is not 0.
  """
  names = {part for name in problem.rules for part in operands(problem, name)}
  names |= {problem.asked, *problem.rules, *problem.given}
  lines = {}
  while len(lines) < len(names):
    before = len(lines)
    for name in names - set(lines):
      parts = operands(problem, name)
      if all(part in lines for part in parts):
        lines[name] = combine(
          problem.rules.get(name, ("sum",)), [lines[part] for part in parts]
        )
    assert len(lines) > before
  unknown = [rule for rule in problem.rules.values() if rule == ("unknown",)]
  assert len(unknown) == len(problem.given)
  x = 0
  for total, value in problem.given.items():
    slope, offset = lines[total]
    assert slope != 0
    x, remainder = divmod(value - offset, slope)
    assert remainder == 0 and x > 0
  return {name: slope * x + offset for name, (slope, offset) in lines.items()}


def combine(rule, parts):
  """Slope and offset of what these make."""
  if rule[0] == "number":
    return (0, rule[1])
  if rule[0] == "unknown":
    return (1, 0)
  if rule[0] == "plus":
    return (parts[0][0], parts[0][1] + rule[2])
  if rule[0] == "times":
    return (parts[0][0] * rule[2], parts[0][1] * rule[2])
  sign = -1 if rule[0] == "minus" else 1
  return tuple(
    first + sign * sum(rest) for first, *rest in zip(*parts, strict=True)
  )


def canonical(problem, name):
  """What the quantity is made of, without names and order."""
  rule = problem.rules.get(name, ("total",))
  if rule[0] == "unknown":
    rule = ("number", solve(problem)[name])
  parts = sorted(canonical(problem, part) for part in operands(problem, name))
  return repr((rule[0], [x for x in rule[1:] if type(x) is int], parts))
