"""Parses and solves word problems from their text alone."""

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
  """The contents of a text.

  Attributes:
    asked: name.
    rules: by name ("number", value), ("unknown",), ("plus" or "times", name,
      value), ("minus", name, name) or ("sum", names ...).
    given: totals with a given number.
    members: items by the total that counts them.
  """

  asked: str
  rules: dict
  given: dict
  members: dict


def read(lines):
  """Sentences in any order; every one must be parsed."""
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
  """Names on which this one depends directly."""
  if name.startswith("all"):
    return problem.members[name]
  return [part for part in problem.rules[name][1:] if isinstance(part, str)]


def below(problem, name):
  """The quantity and all its dependencies."""
  found = [name]
  for name in found:
    found += [part for part in operands(problem, name) if part not in found]
  return found


def needed(problem):
  """Names that the answer needs: all dependencies of the question's quantity.

  If that is unknown, all dependencies of the given total that depends on it.
  """
  if problem.rules.get(problem.asked) != ("unknown",):
    return below(problem, problem.asked)
  (found,) = (
    parts
    for parts in (below(problem, total) for total in problem.given)
    if problem.asked in parts
  )
  return found


def num_operations(problem, names=None):
  """Edges into quantities, the needed ones; something unknown is a constant."""
  names = needed(problem) if names is None else names
  return sum(
    len(operands(problem, name))
    or 1  # A constant alone, or beside another quantity.
    for name in names
  ) + sum(
    problem.rules.get(name, "?")[0] in ("plus", "times") for name in names
  )


def solve(problem):
  """Writes quantities as slope * x + offset, finds each x from a given total.

  Returns:
    Values by name. The solution is unique: quantities are computed one by one,
    and each given total has its own unknown x, with a non-zero slope.
  """
  names = {part for name in problem.rules for part in operands(problem, name)}
  names |= {problem.asked, *problem.rules, *problem.given}
  forms = {}
  while len(forms) < len(names):
    before = len(forms)
    for name in names - set(forms):
      parts = operands(problem, name)
      if all(part in forms for part in parts):
        rule = problem.rules.get(name, ("sum",))
        forms[name] = combine(name, rule, [forms[part] for part in parts])
    assert len(forms) > before
  solved = {"": 1}
  for total, value in problem.given.items():
    (unknown,) = set(forms[total]) - {""}
    slope, offset = forms[total][unknown], forms[total].get("", 0)
    assert slope != 0 and unknown not in solved
    solved[unknown], remainder = divmod(value - offset, slope)
    assert remainder == 0 and solved[unknown] > 0
  return {
    name: sum(slope * solved[x] for x, slope in form.items())
    for name, form in forms.items()
  }


def combine(name, rule, parts):
  """Slopes of the result by unknown; the offset's name is empty."""
  if rule[0] == "number":
    return {"": rule[1]}
  if rule[0] == "unknown":
    return {name: 1}
  signs = [-1 if place and rule[0] == "minus" else 1 for place in range(3)]
  form = {}
  for sign, part in zip(signs, parts, strict=False):
    for x, slope in part.items():
      factor = rule[2] if rule[0] == "times" else 1
      form[x] = form.get(x, 0) + sign * factor * slope
  if rule[0] == "plus":
    form[""] = form.get("", 0) + rule[2]
  return form


def canonical(problem, name):
  """The structure of a quantity, without names and order."""
  rule = problem.rules.get(name, ("total",))
  if rule[0] == "unknown":
    rule = ("number", solve(problem)[name])
  parts = sorted(canonical(problem, part) for part in operands(problem, name))
  return repr((rule[0], [x for x in rule[1:] if type(x) is int], parts))
