"""Backends, which run the integers. The registry is `by_name`; the module of a backend is imported on first use."""
