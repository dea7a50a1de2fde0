"""A configuration's `data` in; batches of ids, targets and what counts out, each a pure function of (seed, step)."""
