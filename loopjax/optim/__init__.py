"""Optimizers, schedules, and the parameters they apply to."""
