"""A resolved run in; the compiled programs of a training and an evaluation step out: loss, optimizer, what is tiled."""
