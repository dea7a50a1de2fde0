"""A configuration's wishes in; the machine as it is out: devices, their mesh, memories, processes, signals, files."""
