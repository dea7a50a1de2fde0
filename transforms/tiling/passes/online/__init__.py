"""Online (streaming) sums: a sum that waits for a maximum or a total shares its loop, kept relative to the running one.

Milakov & Gimelshein 2018 (online softmax), Dao et al. 2022 (FlashAttention).
"""
