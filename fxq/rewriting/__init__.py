"""Changing a graph: patterns, matching, and edits that are counted and attributed."""
