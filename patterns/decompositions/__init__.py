"""Decompositions of attention, recurrent layers and written-out functions into ops of the table."""
