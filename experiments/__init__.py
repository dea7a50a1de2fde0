"""The product: commands that compose a configuration, say what it will cost, train, and show what happened.

Each command is a file here. What it does lies in the folders, which stand on one another in this order:
`configs` (what can be said), `commandline` (how it is said), `runtime` (devices and processes), `data` (batches),
`step` (the compiled programs), `planning` (their cost), `results` (what is left behind), `training` (the loop).
"""
