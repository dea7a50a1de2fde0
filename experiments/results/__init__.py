"""A run and what it measured in; its directory out: what it is, by which it goes on, records, summary and pictures."""
