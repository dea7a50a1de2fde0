"""What the compiler works on: graphs of values, and changes to them; the facts about each value; loops of a plan."""
