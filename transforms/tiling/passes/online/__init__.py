"""Online (streaming) sums: a sum that waits for a maximum or a total shares its loop, kept relative to the running one.

Milakov & Gimelshein 2018 (online softmax, arXiv:1805.02867), Dao et al. 2022 (FlashAttention, arXiv:2205.14135).
"""
