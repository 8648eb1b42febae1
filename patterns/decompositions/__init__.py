"""Decompositions: attention, recurrent layers and written-out functions as ops of the table."""
