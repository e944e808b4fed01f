"""What makes a run robust: files, checkpoints, signals, processes."""
