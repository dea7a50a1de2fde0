"""A configuration's wishes in; the machine as it is out: devices, their mesh, other processes, signals, files."""
