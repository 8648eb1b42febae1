"""Ledger of a quantized model: precision of every op, the reason for it, and its error."""
