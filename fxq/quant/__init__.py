"""Specs, observers, quantization parameters and fake quantizers of single tensors."""
