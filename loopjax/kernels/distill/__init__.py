"""The divergence of two models' token distributions, by vocabulary chunks."""

from loopjax.kernels.distill.api import distill

__all__ = ["distill"]
