"""Graphs as ONNX models: what engines compile, and what files hold."""
