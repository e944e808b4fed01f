"""The loop: what its steps carry, and when it stops."""
