"""Word problems of few operations in a long text (arXiv 2605.26099)."""
