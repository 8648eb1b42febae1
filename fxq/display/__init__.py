"""Text and tables for a terminal, a notebook and files."""
