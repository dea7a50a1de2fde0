"""Families that are mixtures of experts alone, with attention of their own kind. In: what a `config.json` says. Out: a
frozen config and the rows of its parameters. What all mixtures share is in `zoo.families.mixture`.
"""
