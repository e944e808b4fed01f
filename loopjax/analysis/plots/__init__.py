"""Figures of runs: curves, maps, and their colours."""
