"""Shows runs in the terminal: curves, loops, throughput and time left.

`python -m loopjax.watch WORKDIR...` follows running or finished runs. `runs`
reads work directories, `plots` draws lines in Braille characters, `frame`
lays them out.
"""
