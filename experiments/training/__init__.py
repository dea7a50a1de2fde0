"""A resolved run, its programs and its batches in; trained weights, checkpoints and a summary out. The loop is here."""
