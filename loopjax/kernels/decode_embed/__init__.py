"""Soft decode-then-encode: a distribution over tokens, then the mean vector."""

from loopjax.kernels.decode_embed.api import decode_embed

__all__ = ["decode_embed"]
