"""What keeps a run alive and honest: files, checkpoints, signals, processes."""
