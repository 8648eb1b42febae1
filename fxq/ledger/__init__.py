"""What became of every op, and how far the numbers are from the float model's."""
