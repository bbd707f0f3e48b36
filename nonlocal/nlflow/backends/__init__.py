"""What sums run on: compiled loops, tensors, devices and threads."""
