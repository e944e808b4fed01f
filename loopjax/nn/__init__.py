"""Layers: norms, rotary positions, attention, MLPs, blocks, fast weights."""
