"""Text, tables and colours for terminals, notebooks and files."""
