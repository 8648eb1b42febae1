"""Pictures of graphs and of their differences."""
