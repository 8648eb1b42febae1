"""Running of the passes: their context, the checks after each, and the history."""
