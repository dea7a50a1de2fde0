"""Models of whose layers some attend, and others hand on a state from token to token. In: a config and token ids. Out:
a pytree of both kinds; what these layers share is in `shared`."""
