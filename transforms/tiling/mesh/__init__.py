"""What is spread over the devices of a mesh: layouts read from types, unreduced sums, weights gathered once."""
