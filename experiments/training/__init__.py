"""A run's programs and its batches in; the trained state and checkpoints out. The loop is here."""
