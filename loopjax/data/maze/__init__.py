"""Mazes: a generator of its own, and the task of finding a shortest path."""
