"""Helpers without knowledge of graphs, used by all other folders."""
