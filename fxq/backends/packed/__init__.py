"""The fbgemm and qnnpack backends: PyTorch's packed quantized kernels."""
