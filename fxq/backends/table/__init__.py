"""Backends with a kernel table, whose rows are found by the first op of a kernel."""
