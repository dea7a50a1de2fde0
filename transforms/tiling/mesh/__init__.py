"""What is spread over the devices of a mesh: unreduced sums, weights gathered once. `transforms.layout` reads types."""
