"""Backends that hand whole regions of the graph to another engine."""
