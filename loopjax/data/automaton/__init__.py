"""Cellular automata (Language Models Need Sleep, arXiv 2605.26099)."""
