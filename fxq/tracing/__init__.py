"""From the user's model to a graph."""
