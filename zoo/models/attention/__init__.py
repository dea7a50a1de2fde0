"""What attention is made of beside its block: positions and documents in, and the same sums in pieces out.

In: queries, keys and values, or where tokens stand. Out: attention a tile, a head or a piece of a text at a time, or
over devices; rotary frequencies; which document each token is of.
"""
