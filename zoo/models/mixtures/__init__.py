"""What a mixture of experts is made of beside its block.

In: tokens, a router and the experts' matrices. Out: which experts each token goes to, and what they make of it.
"""
