"""Graph in, graph out: the rewrites that let more be cut, in the order in which `driver` tries them."""
