"""Layers and gradients of models with fake quantizers, for quantization-aware training."""
