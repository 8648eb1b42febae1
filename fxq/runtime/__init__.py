"""Running a quantized model: its graph bound to inputs of one kind."""
