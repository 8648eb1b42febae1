"""What everything else uses and what knows nothing of graphs."""
