"""The steps of `quantize`, `prepare`, `calibrate` and `convert`, in order, and the models between them."""
