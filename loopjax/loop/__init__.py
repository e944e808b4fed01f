"""The loop: what its steps pass on, and when it stops."""
