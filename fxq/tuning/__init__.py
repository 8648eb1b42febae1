"""Which layers to put into float, and what that costs: candidates made of one calibration, and judged."""
