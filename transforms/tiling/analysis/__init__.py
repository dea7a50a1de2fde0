"""Graph in, facts out: where each value is cut, what a halo needs, what may be whole or computed again."""
