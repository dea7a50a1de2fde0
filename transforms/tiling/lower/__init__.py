"""Loops in, traced `lax.scan`s out: steps of a tile, what tiles add up to, and the epilogue on whole values after."""
