"""Reading a graph: its metadata, units, regions and text, and running it."""
