"""Which arrays of a call are cut, and along which dimension: arguments and `axis` in, placements out."""
