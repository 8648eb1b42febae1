"""Runtime of a quantized model: binding of its graph to an input kind, and checks of calls."""
