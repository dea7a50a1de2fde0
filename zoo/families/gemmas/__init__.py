"""Gemma and what grew from it. In: what a `config.json` says. Out: a frozen config and the rows of its parameters."""
