"""Text out. In: a model and prompts of ids. Out: the ids that follow."""
