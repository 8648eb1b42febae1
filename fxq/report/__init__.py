"""Report pages, and the latencies and profiles that they show."""
