"""Reader of ONNX models: builds a graph of PyTorch functions and modules from the nodes of a file."""
