"""Llama and what grew from it, mixtures too. In: what a `config.json` says. Out: a frozen config and the rows of its
parameters.
"""
