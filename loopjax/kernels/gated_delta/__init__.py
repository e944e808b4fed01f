"""Gated delta rule: fast weights that decay, are corrected, and are read."""

from loopjax.kernels.gated_delta.api import gated_delta

__all__ = ["gated_delta"]
