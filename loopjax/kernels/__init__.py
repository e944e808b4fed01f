"""Operators, each with a reference in plain JAX and a faster implementation."""
