"""Looking at a trained model: depth, halting, attention, and their pictures.

Numbers come from pure functions on arrays (`depth`, `halting`, `attention`),
their inputs are gathered once (`view`), and `figures` draws them.
"""
