"""Words of a command line in; a frozen `configs.Run` (or another command's options) out, or one error that says what
to write instead. `--help`, sweeps, and how a run that goes on repeats the words of its start. No JAX.
"""
