"""Mazes: a generator, and the task of finding a shortest path."""
