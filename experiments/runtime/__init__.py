"""A configuration's wishes in; the machine as it is out: devices, their mesh, memories, processes, signals, files.

And what a run names: the models that folders describe, and functions of the user's.
"""
