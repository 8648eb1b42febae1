"""ONNX models from ONNX's text form, and ONNX's own implementation of them."""

from typing import Any

import numpy as np


def parsed(
    body: str, inputs: str = "float[N, 3, 8, 8] x", outputs: str = "float[N, M] y", constants: Any = None,
    opset: int = 17,
) -> Any:  # fmt: skip
    """ONNX model of a graph in ONNX's text form, with constants."""
    import onnx.parser

    text = f'<ir_version: 8, opset_import: ["": {opset}, "com.microsoft": 1]> g ({inputs}) => ({outputs}) {{ {body} }}'
    model = onnx.parser.parse_model(text)
    for name, array in (constants or {}).items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(array), name))
    return model


def reference(model: Any, *inputs: Any) -> Any:
    """Outputs of ONNX's own reference implementation."""
    from onnx.reference import ReferenceEvaluator

    names = [value.name for value in model.graph.input]
    return ReferenceEvaluator(model).run(None, dict(zip(names, (x.numpy() for x in inputs), strict=True)))
