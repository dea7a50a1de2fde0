"""A run and a device, here or described by name, in; what its step takes there, and what would fit instead, out."""
