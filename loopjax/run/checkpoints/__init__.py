"""Checkpoints: written (`checkpoint`), kept (`retention`), read by any model or
mesh that fits (`restore`, `integrity`), and quantised (`quantized`).
"""
