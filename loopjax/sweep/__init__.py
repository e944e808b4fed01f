"""A config's named sweeps: one run for each item, restartable."""
