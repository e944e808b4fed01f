"""UTM: one universal-transformer block with memory tokens and ACT.

Source: G. Sapunov, arXiv 2604.21999.
"""

from loopjax.models.utm.config import Config, costs
from loopjax.models.utm.model import HEADLINE, TRACES, Model, loss

__all__ = ["HEADLINE", "TRACES", "Config", "Model", "costs", "loss"]
