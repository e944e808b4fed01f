"""Infrastructure of a run: files, checkpoints, signals, processes."""
