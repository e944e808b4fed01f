"""Trained models of the package: writes, lists and scores them.

Commands take `zoo:NAME` where they read a run; `loopjax.run.zoo` finds it.
"""
