"""Runs at the terminal: curves, loops, rates and time left, as they are made.

`python -m loopjax.watch WORKDIR...` looks at running or finished directories.
`runs` reads them, `plots` draws lines in characters, `frame` puts it together.
"""
