"""Results of calibration: in memory, in checkpoint files, and merged across processes."""
