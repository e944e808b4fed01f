"""Evaluates trained language models on external benchmarks.

`scorer` computes log-likelihoods; `harness`, the only module that imports
lm-evaluation-harness, provides a model for it; `tasks` has offline tasks.
"""
