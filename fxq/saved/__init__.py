"""Files of quantized models: `.fxq` files and exports for other runtimes."""
