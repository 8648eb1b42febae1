"""A float graph run beside its integer form, and parameters fitted to the difference."""
