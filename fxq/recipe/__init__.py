"""What to quantize, how, and through which passes."""
