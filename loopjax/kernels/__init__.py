"""Operators with a reference in plain JAX and faster forms of the same."""
