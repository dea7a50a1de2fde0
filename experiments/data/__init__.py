"""A configuration's `data` in; batches of ids, targets and what counts out, each a pure function of (seed, step)."""


class DataError(ValueError):
    """There is no usable data where the configuration says."""
