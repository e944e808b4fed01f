"""Whether a config fits a machine, by compiling for it without access to it.

python -m loopjax.fit --config=FILE[:preset] --topology=v5e:16x16
"""
