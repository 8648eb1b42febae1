"""Running the passes: what they know, what is checked after each, and the history."""
