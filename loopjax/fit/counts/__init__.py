"""Counts from the text of a compiled program, which `hlo` parses."""
