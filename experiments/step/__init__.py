"""A resolved run in; the compiled programs of a training and an evaluation step out, and the state that they change."""
