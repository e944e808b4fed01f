"""Free-form answers of a language model to questions, and their scores."""
