"""Analysis of a trained model: depth, halting, attention, and their figures.

The model is evaluated once on a sample (`evaluated`). Other modules compute
numbers from it and draw them; `figures` makes all that apply to a run.
"""
