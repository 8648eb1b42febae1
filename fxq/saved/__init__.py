"""A model as one file: its graph as text, its tensors, and what is known of it, as data."""
