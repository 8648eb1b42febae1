"""Sensitivity analysis, recipe search and bisection."""
