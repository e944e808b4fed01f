"""Gated delta rule: fast weights that decay, are corrected, and are read."""

from loopjax.kernels.gated_delta.api import LONGEST_BY_TOKEN, gated_delta

__all__ = ["LONGEST_BY_TOKEN", "gated_delta"]
