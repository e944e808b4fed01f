"""Trained models of the package: writes and lists them.

Commands take `zoo:NAME` where they read a run; `loopjax.run.zoo` finds it.
"""
