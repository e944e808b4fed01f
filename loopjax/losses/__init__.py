"""Losses in nats."""
