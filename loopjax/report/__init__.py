"""Our results next to the papers': `python -m loopjax.report WORKDIR`."""
