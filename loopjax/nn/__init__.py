"""Building blocks: norms, rotary positions, attention, MLP, residual block."""
