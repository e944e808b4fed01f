"""Shows runs in the terminal: curves, loops, throughput and time left.

`loopjax watch RUN...` follows running or finished runs. `runs`
parses work directories; `frame` lays out plots in Braille characters.
"""
