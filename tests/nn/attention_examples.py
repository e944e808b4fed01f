"""cuDNN's attention in plain JAX, for machines that have none."""

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.cudnn import fused_attention_stablehlo as fused


class Instead:
  """Computes what cuDNN is given, and keeps what that was."""

  def __init__(self, monkeypatch):
    self.given = []
    monkeypatch.setattr(fused, "dot_product_attention", self.forward)
    monkeypatch.setattr(fused, "_dot_product_attention_bwd_rule", self.backward)

  def forward(self, query, key, value, bias=None, *, scale, mask_type, **rest):
    assert rest.pop("return_residual")
    lengths = rest.pop("q_seqlen", None), rest.pop("kv_seqlen", None)
    assert not rest
    shapes = [None if x is None else x.shape for x in (query, key, bias)]
    self.given.append((*shapes, mask_type))
    logits = _logits(query, key, bias, lengths, scale, mask_type)
    sums = jax.nn.logsumexp(logits, axis=-1)
    weights = jnp.exp(logits - sums[..., None])
    value = _repeated(value, query)
    return jnp.einsum("bnts,bsnd->btnd", weights, value), sums

  def backward(self, scale, seed, dropout, variadic, mask_type, layout, *rest):
    *_, residuals, cotangent = rest
    query, key, value, bias, *lengths, sums, output = residuals
    has_bias, has_gradient = variadic
    assert layout == fused.AttentionLayout.BTNH.value and not dropout
    assert has_bias == bool(bias.size) and not has_gradient
    lengths = [x if x.size else None for x in lengths[:2]]
    bias = bias if has_bias else None
    logits = _logits(query, key, bias, lengths, scale, mask_type)
    weights = jnp.exp(logits - sums[..., None])
    mean = jnp.sum(output * cotangent, axis=-1)
    d_weights = jnp.einsum(
      "btnd,bsnd->bnts", cotangent, _repeated(value, query)
    )
    mean = jnp.swapaxes(mean, 1, 2)[..., None]
    d_logits = scale * weights * (d_weights - mean)
    d_query = jnp.einsum("bnts,bsnd->btnd", d_logits, _repeated(key, query))
    d_key = jnp.einsum("bnts,btnd->bsnd", d_logits, query)
    d_value = jnp.einsum("bnts,btnd->bsnd", weights, cotangent)
    return d_query, _summed(d_key, key), _summed(d_value, value), *[None] * 7


def _repeated(x, query):
  return jnp.repeat(x, query.shape[2] // x.shape[2], axis=2)


def _summed(x, like):
  batch, length, heads, width = like.shape
  return x.reshape(batch, length, heads, -1, width).sum(3)


def _logits(query, key, bias, lengths, scale, mask_type):
  logits = jnp.einsum("btnd,bsnd->bnts", query, _repeated(key, query)) * scale
  if bias is not None:
    assert not bias.shape[2] % 2 and not bias.shape[3] % 2
    assert bias.shape[2:] == logits.shape[2:]
    logits += bias.astype(logits.dtype)
  if mask_type == fused.MaskType.CAUSAL:
    seen = np.tri(*logits.shape[2:], dtype=bool)
    logits = jnp.where(seen, logits, -jnp.inf)
  if mask_type == fused.MaskType.PADDING:
    seen = jnp.arange(key.shape[1])[None] < lengths[1][:, None]
    logits = jnp.where(seen[:, None, None], logits, -jnp.inf)
  return logits
