"""Evaluates trained language models on external benchmarks.

`scorer` computes log-likelihoods; `bits_per_byte` turns log-likelihoods of
OLMES request files into scores; `answers` generates and checks answers to
questions; `harness`, the only module that imports lm-evaluation-harness,
provides a model for it.
"""
