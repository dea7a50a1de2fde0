"""What the compiler works on: graphs of values, the facts about each, and the loops that a plan consists of."""
