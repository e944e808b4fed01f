"""Chat templates, which are third-party programs."""

import json

import pytest

from loopjax.data.text import chat
from loopjax.errors import UserError

pytest.importorskip("jinja2")
CHATML = """{%- for message in messages %}
  {%- if message.role not in ('user', 'assistant', 'system') %}
    {{- raise_exception('no role ' + message.role) }}
  {%- endif %}
  {{- '<|im_start|>' + message.role + '\\n' + message.content + eos_token }}
{%- endfor %}
{%- if add_generation_prompt %}
  {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
MESSAGES = [
  {"role": "user", "content": "Loops?"},
  {"role": "assistant", "content": "Yes."},
]
EXPECTED = (
  "<|im_start|>user\nLoops?<|im_end|><|im_start|>assistant\nYes.<|im_end|>"
  "<|im_start|>assistant\n"
)
EOS = {"eos_token": {"content": "<|im_end|>", "lstrip": False}}


def folder_of(tmp_path, template, **config):
  (tmp_path / "tokenizer_config.json").write_text(
    json.dumps({**EOS, **config, "chat_template": template})
  )
  return tmp_path


@pytest.mark.parametrize("template", [
  CHATML,
  [{"name": "tool_use", "template": "no"},
   {"name": "default", "template": CHATML}],
])  # fmt: skip
def test_a_conversation_is_what_its_template_makes_of_it(tmp_path, template):
  prompt_of = chat.template(folder_of(tmp_path, template))
  assert prompt_of(MESSAGES) == EXPECTED


def test_a_template_beside_the_config_goes_first(tmp_path):
  (tmp_path / "chat_template.jinja").write_text("{{ messages | tojson }}")
  prompt_of = chat.template(folder_of(tmp_path, CHATML))
  assert json.loads(prompt_of(MESSAGES)) == MESSAGES
  assert "é" in prompt_of([{"role": "user", "content": "é <b>"}])


def test_the_last_message_is_continued(tmp_path):
  prompt_of = chat.template(folder_of(tmp_path, CHATML))
  assert (
    prompt_of(MESSAGES, continued=True)
    == EXPECTED.partition("Yes.")[0] + "Yes."
  )
  assert MESSAGES[-1]["content"] == "Yes."
  shouts = "{% for m in messages %}{{ m.content | upper }}{% endfor %}"
  prompt_of = chat.template(folder_of(tmp_path, shouts))
  with pytest.raises(UserError, match="the final message does not appear"):
    prompt_of(MESSAGES, continued=True)


@pytest.mark.parametrize(("template", "says"), [
  ("{% for x in messages %}", "Unexpected end of template"),
  ("{{ messages[0].content.missing.more }}", "has no attribute 'missing'"),
  ("{{ raise_exception('no\n tools') }}", "chat template: no tools"),
  ("{{ 1 / 0 }}", "division by zero"),
  # Escapes from the sandbox, or changes to arguments.
  ("{{ ''.__class__.__mro__ }}", "'__class__' of 'str' object is unsafe"),
  ("{{ messages.append(1) }}", "'append' of 'list' object is unsafe"),
])  # fmt: skip
def test_a_template_with_an_error_is_one_line(tmp_path, template, says):
  with pytest.raises(UserError, match=says) as error:
    chat.template(folder_of(tmp_path, template))(MESSAGES)
  assert "\n" not in str(error.value)


def test_no_template(tmp_path):
  with pytest.raises(UserError, match="has no chat template"):
    chat.template(tmp_path)
  (tmp_path / "tokenizer_config.json").write_text("[]")
  with pytest.raises(UserError, match="is not a JSON object"):
    chat.template(tmp_path)
  (tmp_path / "tokenizer_config.json").write_text("{")
  with pytest.raises(UserError, match="cannot be read"):
    chat.template(tmp_path)
