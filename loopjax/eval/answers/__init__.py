"""Questions that a language model answers in its own words, and the scores."""
