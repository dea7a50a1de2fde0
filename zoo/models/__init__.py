"""The models and their layers. In: a config and token ids. Out: a pytree, its hidden states, its logits.

Here are the models and what all of them share, in `attention` and `mixtures` what only layers of these kinds are made
of; in `gemmas` and `hybrids` models that share more.
"""
