"""What sums run on."""
