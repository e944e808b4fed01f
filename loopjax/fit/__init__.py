"""Does this config fit that machine? Compiled for it, without it at hand.

python -m loopjax.fit --config=FILE[:preset] --topology=v5e:16x16
"""
