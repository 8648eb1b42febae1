"""What ops cost on this machine, and which of them pay as integers."""
