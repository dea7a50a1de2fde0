"""Words of a command line in; a frozen `configs.Run` (or another command's options) out, or one error that says what
to write instead. `--help`, and how some words replace others. No JAX.
"""
