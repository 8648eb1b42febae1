"""Prices of ops, measured or estimated, and the choice between int8 and float by them."""
