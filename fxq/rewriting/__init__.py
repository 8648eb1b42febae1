"""Editing of graphs: patterns, matching, and edits that are recorded with their rule."""
