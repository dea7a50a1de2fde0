"""Equations with bodies in (loops, branches, `shard_map`), where they stand out: a body is analysed as a program is."""
