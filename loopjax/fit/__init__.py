"""Whether a config fits a machine, by compiling for it without access to it.

loopjax fit --config=FILE[:preset] --topology=v5e:16x16
"""
