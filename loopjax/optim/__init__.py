"""Optimizers, schedules, and which parameter gets which."""
