"""Recipes: which layers to quantize, how, and through which passes."""
