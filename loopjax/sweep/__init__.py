"""Named sweeps of a config: one run per item, restartable."""
