"""Fusion patterns, by subject. Importing this package registers them."""
