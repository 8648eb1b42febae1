"""Analyses of graphs: partition into regions, aliasing, fill constants, bounds of integer sums, arithmetic cost."""
