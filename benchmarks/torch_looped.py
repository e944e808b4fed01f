"""The looped transformer in plain PyTorch with a cache, for comparison."""

import numpy as np
import torch
import torch.nn.functional as F


def _tensor(x):
  return torch.from_numpy(np.array(x, np.float32))


class Model:
  """SwiGLU blocks with RMS norms before each branch; loops end in a norm."""

  def __init__(self, sizes, params):
    self.num_layers, self.num_loops = sizes["num_layers"], sizes["num_loops"]
    self.num_heads = sizes["num_heads"]
    self.embedding = _tensor(params["token_embedding"]["embedding"])
    self.final_norm = _tensor(params["final_norm"]["scale"])
    layers = params["layers"]
    self.layers = []
    for i in range(self.num_layers):
      attention, mlp = layers["attention"], layers["mlp"]
      linear = lambda part, i=i: _tensor(part["kernel"][i]).T.contiguous()  # noqa: E731
      self.layers.append(
        {
          "norm": _tensor(layers["attention_norm"]["scale"][i]),
          "mlp_norm": _tensor(layers["mlp_norm"]["scale"][i]),
          "qkv": torch.cat(
            [linear(attention[name]) for name in ("query", "key", "value")]
          ),
          "output": linear(attention["output"]),
          "gate_value": torch.cat([linear(mlp["gate"]), linear(mlp["value"])]),
          "mlp_output": linear(mlp["output"]),
        }
      )

  @torch.inference_mode()
  def generate(self, prompts, num):
    """Greedy tokens after prompts of one length."""
    tokens = torch.tensor(prompts)
    batch, length = tokens.shape
    width = self.embedding.shape[1] // self.num_heads
    slots = self.num_layers * self.num_loops
    shape = (slots, batch, self.num_heads, length + num, width)
    self.keys, self.values = torch.zeros(shape), torch.zeros(shape)
    places = torch.arange(length + num)[:, None].float()
    frequency = 10_000.0 ** (-torch.arange(width // 2) / (width // 2))
    angles = places * frequency
    self.cos, self.sin = torch.cos(angles), torch.sin(angles)
    new = self._read(tokens, 0)
    found = [new]
    for place in range(length, length + num - 1):
      new = self._read(new[:, None], place)
      found.append(new)
    return torch.stack(found, dim=1).tolist()

  def _read(self, tokens, start):
    """The next token after the tokens from `start` on."""
    x = F.embedding(tokens, self.embedding)
    end = start + tokens.shape[1]
    cos, sin = self.cos[start:end], self.sin[start:end]
    for loop in range(self.num_loops):
      for i, layer in enumerate(self.layers):
        slot = loop * self.num_layers + i
        x = x + self._attention(layer, slot, _norm(x, layer["norm"]), start,
                                end, cos, sin)  # fmt: skip
        both = F.linear(_norm(x, layer["mlp_norm"]), layer["gate_value"])
        gate, value = both.chunk(2, dim=-1)
        x = x + F.linear(F.silu(gate) * value, layer["mlp_output"])
      x = _norm(x, self.final_norm)
    return torch.argmax(F.linear(x[:, -1], self.embedding), dim=-1)

  def _attention(self, layer, slot, x, start, end, cos, sin):
    batch, length, _ = x.shape
    qkv = F.linear(x, layer["qkv"])
    qkv = qkv.view(batch, length, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
    query, key, value = qkv
    self.keys[slot, :, :, start:end] = _rotated(key, cos, sin)
    self.values[slot, :, :, start:end] = value
    mixed = F.scaled_dot_product_attention(
      _rotated(query, cos, sin),
      self.keys[slot, :, :, :end],
      self.values[slot, :, :, :end],
      is_causal=length > 1,
    )
    mixed = mixed.transpose(1, 2).reshape(batch, length, -1)
    return F.linear(mixed, layer["output"])


def _norm(x, scale):
  return F.rms_norm(x, scale.shape, scale, 1e-6)


def _rotated(x, cos, sin):
  first, second = x.chunk(2, dim=-1)
  return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
