"""Tiny folders of the Hub, with tensors of published architectures."""

import json
import pathlib

import numpy as np
import tokenizers
from safetensors.numpy import save_file

FIXTURES = pathlib.Path(__file__).parent / "fixtures"


def oracle(name):
  return np.load(FIXTURES / f"{name}.npz")


def tensors_of(name):
  stored = oracle(name)
  return {
    key.removeprefix("tensor/"): stored[key]
    for key in stored.files
    if key.startswith("tensor/")
  }


def make_folder(folder, name="ouro", tensors=None, config=None, parts=1):
  """A folder of an architecture; `parts` files, with an index if several."""
  folder.mkdir(parents=True)
  given = json.loads(str(oracle(name)["config"]))
  (folder / "config.json").write_text(json.dumps({**given, **(config or {})}))
  write_tokenizer(folder / "tokenizer.json")
  (folder / "tokenizer_config.json").write_text('{"chat_template": "{{ x }}"}')
  tensors = tensors_of(name) if tensors is None else tensors
  names = sorted(tensors)
  if parts == 1:
    save_file(tensors, folder / "model.safetensors")
    return folder
  where = {}
  for part in range(parts):
    file = f"model-{part + 1:05}-of-{parts:05}.safetensors"
    mine = names[part::parts]
    save_file({key: tensors[key] for key in mine}, folder / file)
    where |= dict.fromkeys(mine, file)
  index = {"metadata": {}, "weight_map": where}
  (folder / "model.safetensors.index.json").write_text(json.dumps(index))
  return folder


def write_tokenizer(path):
  """31 ids: an end of text, and words."""
  words = {f"w{i}": i + 1 for i in range(30)}
  model = tokenizers.models.WordLevel({"<end>": 0, **words}, unk_token="w0")
  tokenizer = tokenizers.Tokenizer(model)
  tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
  tokenizer.add_special_tokens(["<end>"])
  tokenizer.save(str(path))
