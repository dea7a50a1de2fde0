"""GPT-2 and the families that have LayerNorm, or blocks, as it has. In: what a `config.json` says. Out: a frozen config
and the rows of its parameters.
"""
