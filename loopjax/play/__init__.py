"""A page to watch a model think, loop by loop.

`python -m loopjax.play WORKDIR` serves it on this machine, or writes it to one
file that needs no server. `load` finds what thinks by the run's task: `puzzle`,
`text` or `questions` runs the model, views/ has a part of the page for each;
`page` makes the HTML, `server` answers the browser.
"""
