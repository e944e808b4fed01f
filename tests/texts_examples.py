"""Texts, chat templates and configs, and Hub folders for them.

`fixtures/make_texts.py` stores other packages' results for them.
"""

import json
import pathlib

import numpy as np
from safetensors.numpy import save_file

FIXTURES = pathlib.Path(__file__).parent / "fixtures"
KINDS = ("unigram", "dummy_prefix", "byte_level")
VOCABULARY = 420  # Rows of the table; a model has its tokenizer's.
PROMPTS = (
  "The loop halts",
  " The loop halts",
  "She reads:  ",
  "A café\n\nthe naïve answer",
  "x",
)
PAIRS = (
  ("The loop was", " true"),
  ("The loop was", "true"),
  ("The loop was ", "true"),
  ("The loop was  ", " true"),
  ("The loop was\n", "falsely, 3 times"),
  ("She reads the memory", " again, 12 times: 12 + 12 = 24."),
  ("A café", " naïve \N{ROCKET}"),
  ("A caf", "é"),
  ("Nobody remem", "bers the state"),
  ("", "The loop"),
  ("", " The loop"),
)
LONG = "The loop halts the memory again, 1 times: 1 + 1 = 2. " * 8

ADDS = {
  "type": "TemplateProcessing",
  "single": [
    {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}},
    {"Sequence": {"id": "A", "type_id": 0}},
  ],
  "pair": [{"Sequence": {"id": "A", "type_id": 0}}],
  "special_tokens": {
    "<|endoftext|>": {
      "id": "<|endoftext|>",
      "ids": [0],
      "tokens": ["<|endoftext|>"],
    }
  },
}
# (Kind, changes of its files) that determine the first token of a text.
BEGINNINGS = (
  ("unigram", {}),
  ("unigram", {"tokenizer_config.json": {"add_bos_token": False}}),
  ("unigram", {"tokenizer_config.json": {"bos_token": None}}),
  ("unigram", {"tokenizer_config.json": None}),
  ("unigram", {"tokenizer.json": {"post_processor": None}}),
  ("dummy_prefix", {"tokenizer_config.json": {"bos_token": "</s>"}}),
  ("dummy_prefix", {"tokenizer.json": {"post_processor": None}}),
  ("byte_level", {"tokenizer_config.json": {"add_bos_token": True}}),
  ("byte_level", {"tokenizer.json": {"post_processor": ADDS}}),
)

MESSAGES = [
  {"role": "system", "content": " Antworte kurz. <é> "},
  {"role": "user", "content": 'Loops & "memory"?\n'},
  {"role": "assistant", "content": "<think>\nhm\n</think>\n\nBoth.  "},
  {"role": "user", "content": "Why?\tSay <b>why</b>."},
]
CONTINUED = [*MESSAGES, {"role": "assistant", "content": " It is <b>b "}]
# Constructs of published templates, in templates of our own.
TEMPLATES = {
  # Without tools a name is None, not undefined.
  "tools_is_none": """{%- if tools is not none %}tools: {{ tools | length }}
{% endif %}{{ tools is defined }} {{ documents is defined }} {{ tools }}
{%- for message in messages %}
[{{ message['role'] }}] {{ message['content'] | trim }}
{%- endfor %}""",
  "chatml_default_system": """{%- if tools %}{{ tools | tojson }}{% endif -%}
{% for message in messages %}
  {% if loop.first and messages[0]['role'] != 'system' %}
    {{ '<|im_start|>system\\nYou help.<|im_end|>\\n' }}
  {% endif %}
{{'<|im_start|>' + message['role'] + '\n' + message['content']}}
{{- '<|im_end|>' + '\n' }}
{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}""",
  "date": """{%- if not date_string is defined %}
  {%- if strftime_now is defined %}
    {%- set date_string = strftime_now("%% day") %}
  {%- else %}
    {%- set date_string = "26 Jul 2024" %}
  {%- endif %}
{%- endif %}
{{- bos_token }}{{ "Today Date: " + date_string + "\\n\\n" }}
{%- set loop_messages = messages %}
{%- for message in loop_messages %}
  {%- set content = '<|start|>' + message.role + '<|end|>\\n\\n' %}
  {%- set content = content + message['content'] | trim + '<|eot|>' %}
  {%- if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}
  {{- content }}
{%- endfor %}""",
  "generation": """{% for message in messages %}
{%- if message.role == 'assistant' %}
<|a|>
{% generation %}
{% set inner = message.content %}
{{ inner }}<|end|>
{% endgeneration %}
{%- else %}
<|{{ message.role }}|>{{ message.content }}<|end|>
{%- endif %}
{% endfor %}{{ inner }}
{%- if add_generation_prompt %}<|a|>{% endif %}""",
  "json": """{% for message in messages -%}
{{ message | tojson }}
{{ message | tojson(indent=2) }}
{{ message | tojson(ensure_ascii=True, sort_keys=True) }}
{{ {'b': 1, 'a': [none, true, 1.5]} | tojson(separators=(',', ':')) }}
{% endfor %}""",
  "inst": """{{ bos_token }}
{%- if messages[0]['role'] == 'system' %}
  {%- set system = messages[0]['content'] %}
  {%- set rest = messages[1:] %}
{%- else %}{% set rest = messages %}
{%- endif %}
{%- for m in rest %}
  {%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}
    {{- raise_exception('roles must alternate') }}
  {%- endif %}
  {%- if m['role'] == 'user' %}
    {%- if loop.last and system is defined %}
      {{- "[INST] " + system + "\\n\\n" + m['content'] + "[/INST]" }}
    {%- else %}{{- "[INST] " + m['content'] + "[/INST]" }}{% endif %}
  {%- elif m.role == 'assistant' %}{{ " " + m.content | trim + eos_token }}
  {%- endif %}
{%- endfor %}""",
  "turns": """{{ bos_token }}{% for message in messages %}
{% if (message['role'] == 'assistant') %}{% set role = 'model' %}
{% else %}{% set role = message['role'] %}{% endif %}
{{ '<start_of_turn>' + role + '\n' + message['content'] | trim
   + '<end_of_turn>\n' }}
{% endfor %}{% if add_generation_prompt %}
{{'<start_of_turn>model\n'}}{% endif %}""",
  "thinking": """{%- set ns = namespace(last=messages|length - 1, multi=true) %}
{%- for message in messages[::-1] %}
  {%- set index = (messages|length - 1) - loop.index0 %}
  {%- if ns.multi and message.role == "user" and message.content is string
      and not (message.content.startswith('<tool>')) %}
    {%- set ns.multi = false %}{% set ns.last = index %}
  {%- endif %}
{%- endfor %}
{%- for message in messages %}
  {%- set content = message.content %}
  {%- if message.role == 'assistant' and '</think>' in content %}
    {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
  {%- endif %}
  {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
{%- endfor %}
{{- ns.last }}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}
  {%- if enable_thinking is defined and enable_thinking is false %}
    {{- '<think>\\n\\n</think>\\n\\n' }}
  {%- endif %}
{%- endif %}""",
  "loop_controls": """{% for message in messages %}
  {%- if message.role == 'system' %}{% continue %}{% endif %}
  {{- loop.index ~ ':' ~ message.content | upper ~ '\n' }}
  {%- if loop.index >= 3 %}{% break %}{% endif %}
{%- endfor %}""",
  "macros": """{%- macro shown(x, depth=0) -%}
{% if x is mapping %}{% for k, v in x | dictsort %}{{ '  ' * depth }}{{ k }}:
{{- shown(v, depth + 1) }}
{% endfor %}{% elif x is iterable and x is not string %}{{ x | join(', ') }}
{%- else %} {{ x }}{% endif %}{% endmacro -%}
{{ shown({'b': {'d': 1}, 'a': [1, 2]}) }}
{% for message in messages %}{{ shown(message) }}
{%- endfor %}""",
  "filters": """{% for role, group in messages | groupby('role') %}
{{ role | capitalize }}: {{ group | map(attribute='content') | map('length')
   | list }} {{ group | selectattr('role', 'equalto', 'user') | list | length }}
{% endfor %}{{ messages | rejectattr('role', 'eq', 'system') | first }}
{{ '%s-%d' | format('a', 3) }} {{ 'a' if missing is not defined else 'b' }}
{{ (messages[-1].content or '') | replace('\t', ' ') | safe }}""",
  "special_tokens": """{{ bos_token }}|{{ eos_token }}|{{ unk_token }}|
{{- pad_token if pad_token is defined else 'no pad' }}
{% for message in messages %}   {# a note #}
    {% if message['role'] == 'user' %}
<user>
{{ message['content'] }}
    {%- endif %}
{% endfor %}
<end>

""",
}

SIZES = (
  "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
  "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps",
  "tie_word_embeddings", "max_position_embeddings",
)  # fmt: skip
_LLAMA3 = {
  "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
  "high_freq_factor": 4.0, "original_max_position_embeddings": 512,
}  # fmt: skip
_WITHOUT = {k: v for k, v in _LLAMA3.items() if not k.startswith("original")}
# (`model_type`, contents of config.json), with some fields missing.
CONFIGS = (
  ("llama", {}),
  ("qwen2", {}),
  ("qwen3", {}),
  ("mistral", {"sliding_window": None}),
  ("llama", {"hidden_size": 64, "num_attention_heads": 4}),
  ("llama", {"rope_theta": 5e5}),
  ("llama", {"rope_theta": 5e5, "rope_scaling": None}),
  ("llama", {"rope_theta": 5e5, "rope_scaling": _LLAMA3}),
  ("llama", {"rope_theta": 5e5, "rope_parameters": _LLAMA3}),
  ("llama", {"rope_parameters": {**_LLAMA3, "rope_theta": 1e6}}),
  ("llama", {"rope_theta": 5e5, "rope_parameters": {"rope_type": "default"}}),
  (
    "llama",
    {
      "rope_scaling": _LLAMA3,
      "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
    },
  ),
  (
    "llama",
    {
      "rope_theta": 7e5,
      "rope_scaling": _WITHOUT,
      "max_position_embeddings": 4096,
    },
  ),
  (
    "llama",
    {"rope_scaling": {**_WITHOUT, "type": "llama3", "rope_type": "llama3"}},
  ),
  ("llama", {"rope_scaling": _LLAMA3, "original_max_position_embeddings": 99}),
  (
    "qwen3",
    {
      "layer_types": ["full_attention"] * 32,
      "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 3e5}
      },
    },
  ),
)


def stored():
  """The tokenizers and the expected results."""
  return json.loads((FIXTURES / "texts.json").read_text())


def write_folder(folder, files, changes=None):
  """Writes the files of a folder with some changes: None removes."""
  folder.mkdir(parents=True, exist_ok=True)
  changes = changes or {}
  for path in folder.glob("*.json"):
    path.unlink()
  for name in {**files, **changes}:
    change = changes.get(name, {})
    if change is None:
      continue
    content = {**files.get(name, {}), **change}
    removed = [key for key, value in change.items() if value is None]
    for key in removed if name != "tokenizer.json" else ():
      del content[key]
    (folder / name).write_text(json.dumps(content), encoding="utf-8")
  config = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"],
    "vocab_size": num_ids(files), "hidden_size": 16, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1,
    "intermediate_size": 24, "max_position_embeddings": 64,
    "tie_word_embeddings": True, "eos_token_id": 2, "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
  }  # fmt: skip
  (folder / "config.json").write_text(json.dumps(config))
  return folder


def num_ids(files):
  """The number of ids of a folder's tokenizer."""
  tokenizer = files["tokenizer.json"]
  vocabulary = tokenizer["model"]["vocab"]
  return max(len(vocabulary), *(x["id"] + 1 for x in tokenizer["added_tokens"]))


def weights():
  """The weights of the model."""
  with np.load(FIXTURES / "texts.npz") as stored_weights:
    return dict(stored_weights)


def make_model(folder, files, changes=None, tensors=None):
  """A folder with weights, by default those of texts.npz."""
  write_folder(folder, files, changes)
  tensors = dict(tensors or weights())
  table = "model.embed_tokens.weight"
  tensors[table] = np.ascontiguousarray(tensors[table][: num_ids(files)])
  save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
  return folder
