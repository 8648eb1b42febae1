"""Analyses of a graph: regions, aliasing, bounds of integer sums, arithmetic cost, varying sizes."""
