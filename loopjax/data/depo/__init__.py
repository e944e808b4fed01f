"""Walks on a shuffled cycle (Language Models Need Sleep, arXiv 2605.26099)."""
