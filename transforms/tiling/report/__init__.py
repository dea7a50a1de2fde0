"""What a plan says of itself: loops, products, bytes; the estimate of memory, and the n that fits a budget."""
