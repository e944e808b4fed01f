"""A page to watch a model think: puzzles, loop by loop.

`python -m loopjax.play WORKDIR` serves it on this machine, or writes it to one
file that needs no server. `thoughts` runs the model, `page` makes the HTML,
`server` answers the browser.
"""
