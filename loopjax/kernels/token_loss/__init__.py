"""Logits and cross-entropy fused, without an array of all logits."""

from loopjax.kernels.token_loss.api import token_loss, token_scores

__all__ = ["token_loss", "token_scores"]
