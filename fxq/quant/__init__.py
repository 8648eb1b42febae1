"""Grids: what a recipe asks for, how ranges are found, and the arithmetic."""
