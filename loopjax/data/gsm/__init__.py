"""Word problems of few operations within a long text (arXiv 2605.26099)."""
