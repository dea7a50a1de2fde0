"""A run's programs and its batches in; the trained state and checkpoints out. The loop is here."""


class DivergedError(RuntimeError):
    """The loss is no longer a finite number."""
