"""Gemma and what grew from it. In: a config and token ids. Out: a pytree whose blocks attend locally and globally."""
