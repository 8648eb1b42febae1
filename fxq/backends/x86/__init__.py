"""The x86 backend: oneDNN's int8 kernels on plain tensors."""
