"""The command: output and refusals."""

import itertools
import json
import pathlib
import types

import pytest
from eval_examples import make_run

from loopjax.generate import __main__ as entry
from loopjax.generate import command, source
from loopjax.generate.engine import Engine

FLAGS = ("--max_new_tokens=12", "--temperature=0")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  """An untrained model with exits."""
  workdir = tmp_path_factory.mktemp("runs") / "a"
  return make_run(workdir, model__exit_gate="joint", model__num_loops=2)


@pytest.mark.long
def test_a_text_follows_its_prompt_and_a_report_counts(run, capsys):
  flags = (str(run), "--prompt=Loops", *FLAGS, "--report")
  assert entry.main([*flags]) == 0
  whole, report = capsys.readouterr()
  assert whole.startswith("Loops") and len(whole.encode()) >= 10
  assert "12 tokens in" in report
  assert "2.000 of 2 loops per token; exits: gate, threshold 1.0" in report
  assert "exited after loop 2: 100.0%" in report
  # Keys and values of two heads of 8, for a layer in two loops, and a length.
  assert f"per_loop, {2 * 2 * 16 * 4 * 48 + 4:,} bytes" in report
  assert entry.main([*flags, "--exit_threshold=1e-6"]) == 0
  assert (
    "1.083 of 2 loops per token" in capsys.readouterr().err
  )  # The first: 2.


@pytest.mark.long
def test_a_file_of_prompts_becomes_a_line_a_text(
  run, tmp_path, monkeypatch, capsys
):
  """In its order, with fewer slots; each text is as for its prompt alone."""
  seconds = itertools.count()  # Start, first token, end.
  clock = types.SimpleNamespace(monotonic=lambda: next(seconds))
  monkeypatch.setattr(command, "time", clock)
  steps, step = [], Engine.step
  monkeypatch.setattr(
    Engine, "step", lambda self: steps.append(step(self)) or steps[-1]
  )
  rows = [{"prompt": text, "id": n} for n, text in enumerate("Loops")]
  path = tmp_path / "prompts.jsonl"
  path.write_text("\n\n".join(map(json.dumps, rows)))
  flags = (str(run), *FLAGS)
  assert entry.main([*flags, f"--prompts={path}", "--slots=2", "--report"]) == 0
  said, report = capsys.readouterr()
  found = [json.loads(line) for line in said.splitlines()]
  assert [{"prompt": one["prompt"], "id": one["id"]} for one in found] == rows
  total = sum(one["tokens"] for one in found)
  assert report.startswith(f"{total} tokens in 2.00 s; first token after 1.00")
  assert "  exited after loop 2: 100.0%" in report.splitlines()
  later = total - len(steps[0])
  assert 0 < later < total and f"; then {later} tokens/s" in report
  assert entry.main([*flags, "--prompt=p"]) == 0
  assert capsys.readouterr().out == f"p{found[3]['text']}\n"
  assert {one["finish"] for one in found} <= {"stop", "length"}
  assert all(one["loops"] == 2 * one["tokens"] for one in found)


@pytest.mark.long
def test_samples_of_a_file_differ(run, tmp_path, capsys):
  path = tmp_path / "prompts.jsonl"
  path.write_text('{"prompt": "a"}\n{"prompt": "a"}\n')
  flags = (str(run), f"--prompts={path}", "--samples=2", "--max_new_tokens=9")
  assert entry.main([*flags]) == 0
  found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
  assert [one["sample"] for one in found] == [0, 1, 0, 1]
  assert len({one["text"] for one in found}) == 4


@pytest.mark.parametrize(("content", "says"), [
  ("", "contains no prompts"),
  ("{", "a.jsonl:1: is not valid JSON"),
  ('{"prompt": 3}', "a.jsonl:1: needs a string 'prompt'"),
  ('["a"]', "a.jsonl:1: needs a string 'prompt'"),
  ('{"prompt": "a"}\n{"prompt": "\\ud800"}', "a.jsonl:2: its 'prompt' is not"),
  (f'{{"prompt": "{"a" * 48}"}}', "49 tokens; the cache"),
])  # fmt: skip
def test_mistakes_in_a_file_of_prompts(run, tmp_path, capsys, content, says):
  path = tmp_path / "a.jsonl"
  path.write_text(content)
  assert entry.main([str(run), f"--prompts={path}"]) == 2
  said, printed = capsys.readouterr()
  assert printed.startswith("error: ") and printed.count("\n") == 1
  assert says in printed and not said


@pytest.mark.long
def test_samples_differ_and_are_repeated_by_their_seed(run, capsys):
  flags = (str(run), "--prompt=L", "--max_new_tokens=9")
  texts = []
  for more in ("--samples=2", "--samples=2", "--seed=1"):
    assert entry.main([*flags, more]) == 0
    texts.append(capsys.readouterr().out)
  assert texts[0] == texts[1]
  first, second = texts[0].split("--- 2")
  assert first.partition(")\n")[2] != second.partition(")\n")[2]
  assert texts[2].strip() in second  # The second's seed is 1.


def test_as_many_tokens_as_fit_unless_a_number_is_given(run, capsys):
  flags = (str(run), "--prompt=a", "--temperature=0", "--report")
  for more in ((), ("--max_new_tokens=47",)):
    assert entry.main([*flags, *more]) == 0
    assert capsys.readouterr().err.startswith("47 tokens in")


@pytest.mark.parametrize(("flags", "says"), [
  (("--prompt=a",), "the following arguments are required: RUN"),
  (("{run}",), "pass one of --prompt=TEXT, --prompts=FILE and --chat"),
  (("{run}", "--prompt=a", "--prompts=b"), "pass one of --prompt=TEXT"),
  (("{run}", "--prompt=a", "--slots=3"), "--slots=3 has no effect without"),
  (("{run}", "--prompt=a", "--prefix_mib=-1"), "--prefix_mib=-1 must be at"),
  (("{hub}", "--checkpoint=3", "--prompt=a"), "hub is not a run"),
  (("{run}", "--prompt=a", "--dtype=float32"), "--dtype=float32 has no"),
  (("{run}", "--prompt=a", "--temperature=-1"), "temperature=-1.0"),
  (("{run}", "--prompt=a", "--samples=0"), "--samples=0"),
  (("{run}", f"--prompt={'a' * 48}"), "49 tokens; the cache"),
  (("{run}", "--prompt=a", "--cache_kind=all"), "cache_kind='all'"),
  (("{run}", "--prompt=\udcff"), "--prompt is not UTF-8"),
  (("{run}", "--prompt=a", "--stop=\udcff"), "--stop is not UTF-8"),
  (("{run}", "--prompt=a", "--stop=x", "--stop="), "--stop= is empty"),
  (("{run}", "--prompt=a", "--max_new_tokens=48"), "than the 47 tokens that"),
  (("{run}", "--prompt=a", "--max_new_tokens=0"), "max_new_tokens=0 is not"),
  (("{run}", "--chat", "--max_new_tokens=49"), "than the 48 tokens that fit"),
  (("{run}", "--prompt=a", "--exit_rule=entropy"), "exit_rule=entropy has no"),
  (("{run}", "--prompt=a", "--exit_kept=copy"), "--exit_kept=copy has no"),
  (
    ("{run}", "--prompt=a", "--exit_rule=fixed", "--exit_kept=state",
     "--exit_threshold=0.5"),
    "exit_threshold=0.5 has no effect with a fixed number",
  ),
  (("{run}", "--prompt=a", "--prefill_loops=3"), "prefill_loops=3 is not in"),
  (("{run}", "--chat"), "has no chat template"),
  (("{run}/no", "--prompt=a"), "no such directory"),
  (("{hub}", "--prompt=a"), "contains no tokenizer.json"),
  (("{hub}/config.json", "--prompt=a"), "is a file"),
])  # fmt: skip
def test_mistakes_are_one_line(run, tmp_path, capsys, flags, says):
  hub = tmp_path / "hub"
  hub.mkdir()
  (hub / "config.json").write_text('{"model_type": "llama"}')
  flags = [
    flag.replace("{run}", str(run)).replace("{hub}", str(hub)) for flag in flags
  ]
  assert entry.main(flags) == 2
  printed = capsys.readouterr().err
  assert printed.startswith("error: ") and printed.count("\n") == 1
  assert says in printed


@pytest.mark.parametrize(("name", "flags", "mebibytes"), [
  ("looped", {}, source.PREFIX_MIB), ("looped", {"prefix_mib": 3}, 3),
  ("looped", {"cache_kind": "mean"}, 0), ("melt", {}, 0),
])  # fmt: skip
def test_prefixes_are_shared_where_the_cache_permits_it(
  name, flags, mebibytes, monkeypatch
):
  """Unless the flag says otherwise."""
  monkeypatch.setattr(source, "make_engine", lambda _, **options: options)
  model = types.SimpleNamespace(facts={"model": name}, context_length=9)
  engine = source.engine_from_flags(
    model, source.ModelFlags(pathlib.Path(), **flags)
  )
  assert engine["prefix_mib"] == mebibytes


def test_a_long_chat_leaves_out_whole_turns(capsys):
  messages = [{"role": role, "content": role} for role in "uauau"]
  writer = types.SimpleNamespace(
    encode=tuple, has_room=lambda prompt: len(prompt) < 4, max_tokens=4
  )

  def prompt_of(messages):
    return "".join(message["content"] for message in messages)

  assert command._shortened(writer, messages, prompt_of) == ("u", "a", "u")
  assert "(dropped the first 2 messages" in capsys.readouterr().out
