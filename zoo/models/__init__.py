"""The models and their layers. In: a config and token ids. Out: a pytree, its hidden states, its logits."""
