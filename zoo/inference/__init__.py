"""Text out. In: a model and prompts of ids. Out: the ids that follow, and the cache of what was read."""
