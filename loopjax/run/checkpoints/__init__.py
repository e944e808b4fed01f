"""Checkpoints: written and kept (`checkpoint`), read by any model or mesh that
fits (`restore`, `integrity`), and quantised (`quantized`).
"""
