"""Reading a graph: its metadata, units and regions, and running it."""
