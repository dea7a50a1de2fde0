"""A resolved run, its programs and its batches in; trained weights, records and checkpoints out. The loop is here."""
