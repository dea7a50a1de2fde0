"""A configuration's wishes in; the machine as it is out: devices, their mesh and memories, other processes, signals, files."""
