"""The jit backend: regions of the graph as programs of compiled loops."""
