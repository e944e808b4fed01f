"""Checkpoints: written and kept (`checkpoint`), and read by any model or mesh
that fits (`restore`, `integrity`).
"""
