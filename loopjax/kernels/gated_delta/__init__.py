"""Gated delta rule: fast weights with decay and error correction."""

from loopjax.kernels.gated_delta.api import LONGEST_BY_TOKEN, gated_delta

__all__ = ["LONGEST_BY_TOKEN", "gated_delta"]
