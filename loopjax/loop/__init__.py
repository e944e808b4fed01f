"""The loop, and what is carried and decided between its steps."""
