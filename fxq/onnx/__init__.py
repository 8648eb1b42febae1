"""Graphs written as ONNX models, for engines and for exported files."""
