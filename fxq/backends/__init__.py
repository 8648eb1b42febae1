"""Backends: what runs the integers. The registry is `by_name`; a backend's module is imported when it is asked for."""
