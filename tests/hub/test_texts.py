"""Texts of imported models, as in transformers and lm-evaluation-harness.

Expected values are from `fixtures/make_texts.py`, stored in texts.json.
"""

import json
import sys

import numpy as np
import pytest
import texts_examples as examples
from tests_support import refused

import loopjax
from loopjax.data.text import chat
from loopjax.data.text.tokenizer import Tokenizer
from loopjax.errors import UserError
from loopjax.eval.scorer import Scorer, ScoringRequest
from loopjax.generate import source
from loopjax.generate import text as text_lib
from loopjax.generate.requests import GenerationRequest
from loopjax.generate.sampling import Sampling
from loopjax.hub import convert, tokenizer_files
from loopjax.saved import language_model

STORED = examples.stored()
EXPECTED = STORED["expected"]


def folder_of(tmp_path, kind, changes=None):
  return examples.make_model(tmp_path / "hub", STORED["kinds"][kind], changes)


def tokenizer_of(folder):
  beginning = tokenizer_files.beginning(folder)
  return Tokenizer(str(folder / "tokenizer.json"), "", *beginning)


@pytest.mark.parametrize("kind", examples.KINDS)
def test_tokens_of_prompts_are_those_of_transformers(kind, tmp_path):
  tokenizer = tokenizer_of(folder_of(tmp_path, kind))
  found = [list(tokenizer.encode_prompt(x)) for x in examples.PROMPTS]
  assert found == EXPECTED[kind]["prompts"]


@pytest.mark.parametrize("number", range(len(examples.BEGINNINGS)))
def test_texts_begin_as_the_folder_says(number, tmp_path):
  kind, changes = examples.BEGINNINGS[number]
  tokenizer = tokenizer_of(folder_of(tmp_path, kind, changes))
  found = list(tokenizer.encode_prompt("The loop"))
  assert found == EXPECTED["beginnings"][number]


MARKS = {
  str(id_): {"content": token, "special": True, "normalized": False}
  for id_, token in ((1, "<|im_start|>"), (2, "<|im_end|>"))
}


@pytest.mark.parametrize("changes", [
  {"tokenizer_config.json": {"added_tokens_decoder": MARKS}},
  {"added_tokens.json": {"<|im_start|>": 1, "<|im_end|>": 2}},
])  # fmt: skip
def test_marks_that_other_files_list_are_tokens(changes, tmp_path):
  """Not characters: of the folder, and of the run that it becomes."""
  text = "<|im_start|>user\nThe loop<|im_end|>\n"
  whole = folder_of(tmp_path / "whole", "byte_level")
  (expected,) = tokenizer_of(whole).encode([text])
  added = json.loads((whole / "tokenizer.json").read_text())["added_tokens"]
  changes = changes | {"tokenizer.json": {"added_tokens": added[:1]}}
  folder = folder_of(tmp_path, "byte_level", changes)
  (without,) = tokenizer_of(folder).encode([text])
  assert len(without) > len(expected)
  run = tmp_path / "run"
  convert.import_folder(folder, run)
  for model in (
    source.load_folder(folder, dtype="float32"),
    language_model.load(run),
  ):
    (found,) = model.tokenizer.encode([text])
    assert found.tolist() == expected.tolist()
  exported = Tokenizer(str(run / "hub" / "tokenizer.json"))
  assert exported.encode([text])[0].tolist() == expected.tolist()


def test_a_mark_with_another_id_is_refused(tmp_path):
  marks = {"7": {"content": "<|tool|>"}}
  changes = {"tokenizer_config.json": {"added_tokens_decoder": marks}}
  folder = folder_of(tmp_path, "byte_level", changes)
  with refused(r"'<\|tool\|>' would have the id 380, not 7"):
    convert.read_folder(folder)


@pytest.mark.parametrize("kind", examples.KINDS)
def test_tokens_of_pairs_are_those_of_the_harness(kind, tmp_path):
  tokenizer = tokenizer_of(folder_of(tmp_path, kind))
  found = tokenizer.encode_pairs(examples.PAIRS)
  compared = 0
  for ours, theirs in zip(found, EXPECTED[kind]["pairs"], strict=True):
    if theirs[1]:  # The harness fails if one token spans the boundary.
      assert [part.tolist() for part in ours] == theirs
      compared += 1
  assert compared >= len(examples.PAIRS) - 2


@pytest.mark.parametrize("kind", [*examples.KINDS, "bytes"])
def test_parts_of_a_text_have_its_tokens(kind, tmp_path):
  """And continuations get no additional space."""
  tokenizer = Tokenizer("bytes")
  if kind != "bytes":
    tokenizer = tokenizer_of(folder_of(tmp_path, kind))
  parts = [["She reads the", " memory", " again,", " 3 times"], ["The loop"]]
  found = tokenizer.encode_parts(parts)
  for texts, ids in zip(parts, found, strict=True):
    (whole,) = tokenizer.encode(["".join(texts)])
    assert np.array_equal(np.concatenate(ids), whole)
    for text, part in list(zip(texts, ids, strict=True))[1:]:
      assert b"".join(map(tokenizer.piece, part)).decode() == text
  if kind in ("dummy_prefix", "byte_level"):
    parts = tokenizer.encode_parts([["The loop ", "halts"]])[0]
    texts = [b"".join(map(tokenizer.piece, part)).strip() for part in parts]
    assert texts == [b"The loop", b"halts"]
    assert tokenizer.piece(parts[1][0]).startswith(b" ")


def test_where_one_token_spans_the_boundary_something_is_scored(tmp_path):
  """Alone, without the leading space of a text."""
  tokenizer = tokenizer_of(folder_of(tmp_path, "dummy_prefix"))
  (pair,) = tokenizer.encode_pairs([("She rea", "ds")])
  text = b"".join(map(tokenizer.piece, pair[1]))
  assert text == b"ds"
  assert tokenizer.decode(pair[0].tolist()) == "<s> She rea"
  library = tokenizer_of(folder_of(tmp_path, "unigram"))
  with pytest.raises(UserError, match="'' has no token"):
    library.encode_pairs([("She", "")])


def test_pairs_of_bytes_are_their_bytes():
  """With the separator of documents, and trailing spaces moved."""
  found = Tokenizer("bytes").encode_pairs([("ab ", "c"), ("", "é"), (" ", "x")])
  assert [[part.tolist() for part in pair] for pair in found] == [
    [[256, *b"ab"], [*b" c"]],
    [[256], [*"é".encode()]],
    [[256], [*b" x"]],
  ]


@pytest.mark.parametrize("begins", [True, False])
def test_bytes_are_exported_as_a_tokenizer(begins, tmp_path):
  ours = Tokenizer("bytes", add_begin_token=begins)
  tokenizer_files.write_bytes(tmp_path)
  tokenizer_files.write_ends(tmp_path, ours)
  end = chat.special_tokens(tmp_path)["eos_token"]
  beginning = tokenizer_files.beginning(tmp_path)
  theirs = Tokenizer(str(tmp_path / "tokenizer.json"), end, *beginning)
  assert (ours.end, ours.start) == (theirs.end, theirs.start)
  for text in ("", " ", "a  b\r\n\n", "na\u00efve \U0001f600", "e\u0301 1234"):
    ids = ours.encode_prompt(text)
    assert theirs.encode_prompt(text) == ids
    assert theirs.decode(ids[1:]) == ours.decode(ids[1:])
    assert theirs.num_bytes[np.array(ids)].sum() == len(text.encode())


def test_a_text_that_says_how_it_begins_begins_once(tmp_path):
  tokenizer = tokenizer_of(folder_of(tmp_path, "unigram"))
  assert tokenizer.encode_prompt("<s>The")[:1] == (1,)
  assert tokenizer.encode_prompt("<s>The").count(1) == 1
  assert tokenizer.encode_prompt("") == (1,)
  ((context, _),) = tokenizer.encode_pairs([("<s>The loop", " halts")])
  assert context.tolist().count(1) == 1


@pytest.mark.parametrize(("kind", "begins"), [
  ("unigram", "<s>"), ("dummy_prefix", "<s>"), ("byte_level", "nothing"),
])  # fmt: skip
def test_scores_and_texts_are_those_of_the_packages(kind, begins, tmp_path):
  expected = EXPECTED[kind]
  model = source.load_folder(folder_of(tmp_path, kind), dtype="float32")
  assert model.facts["texts_begin_with"] == begins
  pairs = model.tokenizer.encode_pairs(examples.PAIRS)
  scores = Scorer(model)([ScoringRequest(*pair) for pair in pairs])
  for score, theirs in zip(scores, expected["scores"], strict=True):
    if theirs:
      assert score.log_likelihood == pytest.approx(theirs[0], abs=1e-3)
      assert score.is_greedy == theirs[1]
  engine = source.make_engine(model, num_slots=8, max_tokens=64)
  asked = [
    GenerationRequest(
      model.tokenizer.encode_prompt(text), 12, Sampling(temperature=0)
    )
    for text in examples.PROMPTS
  ]
  texts = text_lib.generate_texts(engine, model.tokenizer, asked)
  for ours, theirs in zip(texts, expected["texts"], strict=True):
    assert [token.token for token in ours.tokens] == theirs["ids"]
    if "\ufffd" not in theirs["text"]:  # Otherwise it depends on the context.
      assert ours.text == theirs["text"]


def test_another_beginning_can_be_asked_for(tmp_path):
  tokenizer = tokenizer_of(folder_of(tmp_path, "unigram"))
  plain = tokenizer.encode_prompt("The loop")
  assert tokenizer.beginning_with(None) is tokenizer
  nothing = tokenizer.beginning_with("none")
  assert nothing.encode_prompt("The loop") == plain[1:]
  assert nothing.beginning == "nothing" and nothing.begin == 1
  other = tokenizer.beginning_with("</s>")
  assert other.encode_prompt("The loop") == (2, *plain[1:])
  assert other.beginning == "</s>"
  with pytest.raises(UserError, match="--bos='<x>' is not a token of"):
    tokenizer.beginning_with("<x>")
  own = Tokenizer("bytes")
  assert own.beginning == "document separator"
  assert own.beginning_with("none").encode_prompt("a") == (97,)


@pytest.mark.parametrize(("changes", "message"), [
  ({"tokenizer.json": {"post_processor": {
    **examples.ADDS, "single": examples.ADDS["single"][::-1],
  }}}, r"adds \['<\|endoftext\|>'\] to a text"),
  ({"tokenizer.json": {"post_processor": {
    **examples.ADDS, "single": examples.ADDS["single"][:1] * 2
    + examples.ADDS["single"][1:],
  }}}, "one token at its beginning"),
])  # fmt: skip
def test_what_a_text_cannot_begin_with_is_one_line(changes, message, tmp_path):
  folder = folder_of(tmp_path, "byte_level", changes)
  with pytest.raises(UserError, match=message):
    tokenizer_files.beginning(folder)


@pytest.mark.parametrize("kind", ["unigram", "byte_level"])
def test_an_imported_run_and_its_export_begin_as_the_folder(kind, tmp_path):
  """Its own files are restored unless the run has another begin token."""
  folder, run = folder_of(tmp_path, kind), tmp_path / "run"
  convert.import_folder(folder, run)
  prompt = EXPECTED[kind]["prompts"][0]
  found = language_model.load(run)
  assert list(found.tokenizer.encode_prompt(examples.PROMPTS[0])) == prompt
  begins = {"unigram": "<s>", "byte_level": "nothing"}[kind]
  assert found.facts["texts_begin_with"] == begins
  convert.export_run(run, tmp_path / "out", convert.Export("llama"))
  for name in ("tokenizer.json", "tokenizer_config.json"):
    ours, theirs = (
      json.loads((place / name).read_text())
      for place in (tmp_path / "out", folder)
    )
    assert ours == theirs
  path = run / "config.json"
  config = json.loads(path.read_text())
  config["task"]["begin_token"] = ""
  config["task"]["add_begin_token"] = kind == "byte_level"
  path.write_text(json.dumps(config))
  convert.export_run(run, tmp_path / "other", convert.Export("llama"))
  again = tokenizer_of(tmp_path / "other")
  expected = prompt[1:] if kind == "unigram" else [2, *prompt]
  assert list(again.encode_prompt(examples.PROMPTS[0])) == expected
  del config["task"]["begin_token"]
  path.write_text(json.dumps(config))
  for load in (language_model.load, loopjax.load):
    with pytest.raises(UserError, match="earlier version.* import it again"):
      load(run)


@pytest.mark.parametrize("name", examples.TEMPLATES)
def test_chats_are_those_of_transformers(name, tmp_path):
  pytest.importorskip("jinja2")
  changes = {
    "tokenizer_config.json": {"chat_template": examples.TEMPLATES[name]}
  }
  prompt_of = chat.template(folder_of(tmp_path, "byte_level", changes))
  asked, continued = EXPECTED["chats"][name]
  assert prompt_of(examples.MESSAGES) == asked
  if continued is not None:  # Otherwise transformers refuses.
    assert prompt_of(examples.CONTINUED, continued=True) == continued


@pytest.mark.parametrize("number", range(len(examples.CONFIGS)))
def test_configs_are_read_as_transformers_reads_them(number):
  """Rotations under two names, and fields that are missing."""
  kind, given = examples.CONFIGS[number]
  layout = convert.LAYOUTS[kind]
  theirs = EXPECTED["configs"][number]
  whole = convert.with_defaults(layout, {"model_type": kind, **given})
  ours = convert.settings_of(layout, whole)
  rope = theirs.pop("rope_parameters")
  rope = rope.get("full_attention", rope)
  assert ours["rope_base"] == rope["rope_theta"]
  scaling = ()
  if rope["rope_type"] == "llama3":
    scaling = (
      rope["factor"], rope["low_freq_factor"], rope["high_freq_factor"],
      rope["original_max_position_embeddings"],
    )  # fmt: skip
  assert ours["rope_scaling"] == scaling
  width = theirs["hidden_size"]
  assert ours == ours | {
    "width": width,
    "num_layers": theirs["num_hidden_layers"],
    "num_heads": theirs["num_attention_heads"],
    "num_key_value_heads": theirs["num_key_value_heads"],
    "head_width": theirs.get("head_dim") or width // ours["num_heads"],
    "tied": theirs["tie_word_embeddings"],
    "norm_epsilon": theirs["rms_norm_eps"],
  }
  assert int(ours["mlp_ratio"] * width) == theirs["intermediate_size"]
  for name in ("vocab_size", "max_position_embeddings"):
    assert whole[name] == theirs[name]


@pytest.mark.manual
def test_the_packages_still_say_so():
  """The stored values, recomputed."""
  for name in ("torch", "transformers", "lm_eval"):
    pytest.importorskip(name)
  sys.path.append(str(examples.FIXTURES))
  import make_texts

  made = make_texts.make_expected(STORED["kinds"], examples.weights())
  found, expected = json.loads(json.dumps(made)), examples.stored()["expected"]
  for kind in examples.KINDS:
    for name in ("scores", "rolling"):
      ours, theirs = (x[kind].pop(name) for x in (found, expected))
      assert (
        ours == pytest.approx(theirs, abs=1e-4)
        if name == "rolling"
        else (
          [one and one[0] for one in ours]
          == pytest.approx([one and one[0] for one in theirs], abs=1e-4)
        )
      )
  assert found == expected


@pytest.mark.manual
@pytest.mark.parametrize("kind", examples.KINDS)
def test_our_model_of_the_harness_scores_alike(kind, tmp_path):
  """Also whole texts by windows."""
  pytest.importorskip("lm_eval")
  from lm_eval.api.instance import Instance

  from loopjax.eval import harness

  convert.import_folder(folder_of(tmp_path, kind), tmp_path / "run")
  model = harness.Model(workdir=str(tmp_path / "run"))
  asked = [
    Instance("loglikelihood", {}, pair, at)
    for at, pair in enumerate(examples.PAIRS)
  ]
  for ours, theirs in zip(
    model.loglikelihood(asked), EXPECTED[kind]["scores"], strict=True
  ):
    if theirs:
      assert ours[0] == pytest.approx(theirs[0], abs=1e-3)
      assert ours[1] == theirs[1]
  (whole,) = model.loglikelihood_rolling(
    [Instance("loglikelihood_rolling", {}, (examples.LONG,), 0)]
  )
  assert whole == pytest.approx(EXPECTED[kind]["rolling"], abs=1e-2)
