"""Weights in files of other tools: readers, one module per format, and writers. Each gives weights by their names."""
