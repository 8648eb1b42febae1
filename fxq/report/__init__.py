"""The report: one HTML file about a quantized model."""
