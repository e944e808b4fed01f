"""Our results next to the papers': `loopjax report RUN`."""
