"""Backends that run whole regions of the graph in another engine."""
