"""Other ways to a linear head and its loss, each in an environment of its own: `python -m experiments.bench rivals`.

`table` says what they are; `environments` makes their environments; `worker` runs in them, with what `with_jax` and
`with_torch` build there, and without this project; `compare` lets them take turns and prints what they took.
"""
