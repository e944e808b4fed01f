"""Our results beside the papers': `python -m loopjax.report WORKDIR`."""
