"""Analysis of a trained model: depth, halting, attention, and their figures.

The model is evaluated once on a sample (`evaluated`). Pure functions on arrays
compute the numbers (`depth`, `halting`, `attention`), and `figures` draws them.
"""
