"""Rows that are read elsewhere than where they lie: shifted along the axis, every few of them, the other way round."""
