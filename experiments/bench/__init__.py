"""Measurements against what a user would otherwise write. Each module prints a table when run."""
