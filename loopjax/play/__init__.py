"""A web page that shows a model's predictions after every loop.

`loopjax play RUN` serves it locally, or writes it to a file that
needs no server. `load` creates the inspector for the run's task, with `puzzle`,
`text`, `questions` or `cycle`, each of which has a part of the page in views/.
`page` makes the HTML, and `server` answers the browser.
"""
