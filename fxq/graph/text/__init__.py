"""Text form of a graph: its writer, its reader, and the names that a text may use."""
