"""Models that are called in several ways: forms of calls, one graph of tensors for each, and the choice at run time."""
