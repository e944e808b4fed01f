"""Training on conversations: what templates write, and what is predicted."""

import json
import sys

import numpy as np
import pytest
import tokenizers
from text_examples import jsonl

from loopjax.data.text import chat, preparation, task
from loopjax.data.text.config import Config
from loopjax.errors import UserError
from loopjax.hub import tokenizer_files
from loopjax.run import workdir as workdir_lib

transformers = pytest.importorskip("transformers")
START, END = "<|im_start|>", "<|im_end|>"
# The same text, with and without marks around what the assistant writes.
PLAIN = (
  "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content"
  " + '<|im_end|>\\n' }}{%- endfor %}"
  "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
MARKED = (
  "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
  "{%- if m.role == 'assistant' %}{% generation %}{{ m.content"
  " + '<|im_end|>' }}{% endgeneration %}"
  "{%- else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\\n' }}"
  "{%- endfor %}"
  "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def turns(number):
  return [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": f"How much is {number} + 1?"},
    {"role": "assistant", "content": f"é{number + 1}."},
    {"role": "user", "content": "Sure? "},
    {"role": "assistant", "content": "Yes.\n"},
  ]


def folder_of(path, template):
  """Files of a tokenizer of bytes with two special tokens."""
  path.mkdir()
  tokenizer_files.write_bytes(path)
  file = str(path / "tokenizer.json")
  made = tokenizers.Tokenizer.from_file(file)
  made.add_special_tokens([START, END])
  made.save(file)
  if template:
    (path / "chat_template.jinja").write_text(template)
  return path


def config_of(tmp_path, rows, template=PLAIN, **settings):
  path = tmp_path / "chats.jsonl"
  path.write_bytes(jsonl(rows))
  folder = folder_of(tmp_path / "model", template)
  given = {
    "train_files": str(path),
    "text_field": "messages",
    "tokenizer": str(folder / "tokenizer.json"),
    "end_token": END,
    "begin_token": START,
    "sequence_length": 256,
    "packed": False,
  }
  return Config(**given | settings)


def library_of(config, **options):
  return transformers.PreTrainedTokenizerFast(
    tokenizer_file=config.tokenizer, **options
  )


def documents(config):
  """(ids, whether each is predicted) of each document of all splits."""
  found = []
  for split in preparation.SPLITS:
    dataset = task.make_dataset(config, split, batch_size=1, seed=0)
    batches = iter(dataset.batches)
    for _ in range(dataset.facts[f"{split}_rows"]):
      row = {name: value[0] for name, value in next(batches).items()}
      stop = int(np.flatnonzero(row["weights"])[-1]) + 1
      ids = [row["inputs"][0], *row["targets"][:stop]]
      found.append((list(map(int, ids)), [0, *row["weights"][:stop]]))
  return sorted(found)


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_what_is_trained_is_what_transformers_marks(tmp_path, template, capsys):
  """Tokens and mask are of its own; a chat has this prompt."""
  chats = [turns(number) for number in range(30)]
  config = config_of(tmp_path, [{"messages": x} for x in chats], template)
  library = library_of(config, chat_template=MARKED)
  expected = []
  for messages in chats:
    one = library.apply_chat_template(
      messages, return_dict=True, return_assistant_tokens_mask=True
    )
    *ids, last = one["input_ids"]  # A line break, which nothing predicts.
    *mask, of_last = one["assistant_masks"]
    assert library.decode([last]) == "\n" and not of_last
    expected.append((ids, mask))
  assert documents(config) == sorted(expected)
  said = capsys.readouterr().out
  assert (f"{START}user\nSure? {END}\n{START}assistant\n⟦Yes.\n{END}⟧") in said
  assert said.count("⟧") == 3  # Of two turns, and of the line above.
  assert f":\n{START}system\nBe short.{END}" in said


def test_questions_and_answers_are_a_conversation(tmp_path):
  """Of two columns, with the template beside the tokenizer."""
  rows = [{"q": f"{n}?", "a": f"{n}!"} for n in range(30)]
  config = config_of(tmp_path, rows, text_field="a", prompt_field="q")
  library = transformers.PreTrainedTokenizerFast(
    tokenizer_file=config.tokenizer
  )
  ids, mask = documents(config)[0]
  text = library.decode(ids)
  number = text.split("user\n")[1].partition("?")[0]
  assert text == (
    f"{START}user\n{number}?{END}\n{START}assistant\n{number}!{END}"
  )
  predicted = [one for one, counts in zip(ids, mask, strict=True) if counts]
  assert library.decode(predicted) == f"{number}!{END}"
  # Another separator than the default is the user's own format.
  (tmp_path / "plain").mkdir()
  plain = config_of(
    tmp_path / "plain", rows, text_field="a", prompt_field="q", separator=" "
  )
  assert library.decode(documents(plain)[0][0]).startswith(f"{START}0? 0!")


def fault(tmp_path, messages, template=PLAIN):
  rows = [{"messages": turns(1)}, {"messages": messages}]
  config = config_of(tmp_path, rows, template)
  with pytest.raises(UserError) as error:
    documents(config)
  return str(error.value)


@pytest.mark.parametrize("template", [PLAIN, None])
@pytest.mark.parametrize(("turn", "says"), [
  ({"role": "Assistant"}, "(system, developer, user, assistant, tool)"),
  ({"role": "chatgpt"}, "with a role"),
  ({"role": "tool", "tool_call_id": "1"}, "'tool_call_id' of a message is un"),
  ({"reasoning_content": "Hm."}, "'reasoning_content' of a message is unsup"),
  ({"tool_calls": [{}]}, "'tool_calls' of a message is unsupported"),
  ({"weight": 0.5}, "the weight 0.5 is not 0 or 1"),
  ({"content": 3}, "a string as content"),
])  # fmt: skip
def test_what_a_turn_says_is_never_dropped(tmp_path, template, turn, says):
  """Turns are honoured or refused, with file and line."""
  messages = turns(2)
  messages[2] = {**messages[2], **turn}
  found = fault(tmp_path, messages, template)
  assert "chats.jsonl:2: 'messages': " in found and says in found
  assert "\n" not in found


@pytest.mark.parametrize("template", [PLAIN, None])
def test_turns_of_weight_0_are_read_and_not_predicted(tmp_path, template):
  messages = turns(1)
  messages[2]["weight"] = 0
  messages[4] |= {"weight": 1, "reasoning_content": ""}
  rows = [{"messages": messages}, {"messages": turns(2)}]
  rows += [{"messages": turns(n)} for n in range(3, 20)]
  config = config_of(tmp_path, rows, template)
  library = transformers.PreTrainedTokenizerFast(
    tokenizer_file=config.tokenizer
  )
  found = {
    library.decode([i for i, counts in zip(*one, strict=True) if counts])
    for one in documents(config)
    if "How much is 1 + 1?" in library.decode(one[0])
  }
  assert found == {f"Yes.\n{END}"}


@pytest.mark.parametrize("template", [PLAIN, MARKED, None])
def test_conversations_that_the_assistant_begins_are_in_all_splits(
  tmp_path, template
):
  """What the template writes before it is no prompt that they share."""
  rows = [
    {"messages": [{"role": "assistant", "content": f"I am {number}."}]}
    for number in range(60)
  ]
  config = config_of(tmp_path, rows, template, test_share=0.3)
  train, test = (
    task.make_dataset(config, split, batch_size=1, seed=0).facts[
      f"{split}_documents"
    ]
    for split in ("train", "test")
  )
  assert train > 30 and 6 < test < 30


CALLS = PLAIN.replace(
  "m.content + ",
  "(m.reasoning_content or '') + m.content"
  " + (m.tool_calls | tojson if m.tool_calls else '') + ",
)


def test_what_the_template_reads_is_trained(tmp_path):
  """Tools, their calls and thoughts, as `trl` passes them."""
  call = {"name": "add", "arguments": {"of": 1}}
  called = {"role": "assistant", "reasoning_content": "Hm.", "content": None}
  messages = [
    *turns(1)[:2],
    {**called, "tool_calls": [call]},
    {"role": "tool", "content": "2"},
    {"role": "assistant", "content": "Two."},
  ]
  rows = [{"messages": messages}] + [{"messages": turns(n)} for n in range(20)]
  config = config_of(tmp_path, rows, CALLS)
  library = library_of(config, chat_template=CALLS)
  (found,) = (
    one for one in documents(config) if "tool\n" in library.decode(one[0])
  )
  messages[2]["content"] = ""
  text = library.apply_chat_template(messages, tokenize=False)
  assert library.decode(found[0]) == text.removesuffix("\n")
  predicted = library.decode(
    [i for i, counts in zip(*found, strict=True) if counts]
  )
  assert predicted == f"Hm.{json.dumps([call])}{END}Two.{END}"


def test_without_a_template_a_tools_answer_is_read(tmp_path):
  messages = [*turns(1)[:4], {"role": "tool", "content": "2"}, turns(1)[4]]
  rows = [{"messages": messages}] + [{"messages": turns(n)} for n in range(20)]
  config = config_of(tmp_path, rows, None)
  library = library_of(config)
  ((ids, mask),) = (
    one for one in documents(config) if "\n\n2\n\n" in library.decode(one[0])
  )
  assert library.decode(ids).endswith(f"Sure? \n\n2\n\nYes.\n{END}")
  predicted = library.decode(
    [i for i, counts in zip(ids, mask, strict=True) if counts]
  )
  assert predicted == f"é2.\n\nYes.\n{END}"


def test_names_are_for_templates(tmp_path):
  messages = turns(1)
  messages[1]["name"] = "Ann"
  assert "'name' of a message is unsupported" in (
    fault(tmp_path, messages, None)
  )


def test_an_empty_answer_ends_once():
  template = chat.Template("folder", PLAIN, ())
  asked = {"role": "user", "content": "Silent?"}
  found = template.segments([asked, {"role": "assistant", "content": ""}])
  assert [text for text, predicted in found if predicted] == [END]


def test_a_package_that_is_missing_is_no_fault_of_a_row(tmp_path, monkeypatch):
  """Skipping malformed rows would drop every conversation."""
  rows = [{"messages": f"Plain {number}."} for number in range(30)]
  rows.append({"messages": turns(1)})
  config = config_of(tmp_path, rows, on_bad_document="skip")
  monkeypatch.setitem(sys.modules, "transformers.utils", None)
  with pytest.raises(UserError, match="need the package transformers"):
    documents(config)


def test_a_template_that_rewrites_what_was_said_is_refused(tmp_path):
  """It writes a turn in one way if it is the last, and then in another."""
  last = PLAIN.replace("m.content", "(m.content if loop.last else '...')")
  found = fault(tmp_path, turns(1), last)
  assert "chats.jsonl:1: " in found
  assert "message 3 in another way in a longer conversation" in found


def test_a_run_keeps_the_template_of_its_tokenizer(tmp_path):
  """Its data can be made again, and it chats as it was trained."""
  folder = folder_of(tmp_path / "model", PLAIN)
  (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END}))
  run = tmp_path / "run"
  run.mkdir()
  workdir_lib.keep_hub_files(None, run, str(folder / "tokenizer.json"))
  kept = chat.of_tokenizer(str(run / "hub" / "tokenizer.json"))
  assert (
    kept and kept[1:] == chat.of_tokenizer(str(folder / "tokenizer.json"))[1:]
  )
