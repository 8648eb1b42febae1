"""Runs of ONNX models in two engines, for the tests of `fxq/onnx`; and single ops as graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from fxq.onnx.graph import write_onnx
from fxq.ops import OPS

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")
openvino = pytest.importorskip("openvino")


def exact_options() -> Any:
    """Options of a session of ONNX Runtime on one thread whose integer sums are exact on CPUs without VNNI, too."""
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    options.add_session_config_entry("session.x64quantprecision", "1")
    return options


def exact_session(file: Any) -> Any:
    """Session of ONNX Runtime for a path, or for the bytes of a model, with `exact_options`."""
    model = file if isinstance(file, bytes) else str(file)
    return ort.InferenceSession(model, exact_options(), providers=["CPUExecutionProvider"])


def run_onnxruntime(model: Any, inputs: Sequence[Tensor], optimized: bool = False) -> list[Tensor]:
    """Run a model in ONNX Runtime, node by node, or with its optimizations."""
    options = exact_options()
    if not optimized:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    feeds = {arg.name: x.numpy() for arg, x in zip(session.get_inputs(), inputs, strict=True)}
    return [torch.from_numpy(y) for y in session.run(None, feeds)]


@cache
def _core() -> Any:
    return openvino.Core()


def run_openvino(model: Any, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Run a model in OpenVINO."""
    settings = {"INFERENCE_NUM_THREADS": 1, "INFERENCE_PRECISION_HINT": "f32"}
    compiled = _core().compile_model(_core().read_model(model.SerializeToString()), "CPU", settings)
    feeds = {arg.name: x.numpy() for arg, x in zip(model.graph.input, inputs, strict=True)}
    read = [feeds[next(iter(port.names & feeds.keys()))] for port in compiled.inputs]  # without unused inputs
    request = compiled.create_infer_request()
    results = request.infer(read)
    return [torch.from_numpy(results[out].copy()) for out in compiled.outputs]


ENGINES: dict[str, Callable[..., list[Tensor]]] = {"onnxruntime": run_onnxruntime, "openvino": run_openvino}


def single(op: str, *values: Any, **options: Any) -> fx.GraphModule:
    """Graph of one call of an op; tensors, also in lists, are its inputs, and parameters its constants."""
    root, graph = torch.nn.Module(), fx.Graph()

    def read(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [read(v) for v in value]
        if isinstance(value, torch.nn.Parameter):
            name = f"weight_{len(list(root.parameters()))}"
            root.register_parameter(name, value)
            return graph.get_attr(name)
        return graph.placeholder(f"x{len(graph.nodes)}") if isinstance(value, Tensor) else value

    arguments = [read(value) for value in values]
    graph.output(graph.call_function(OPS[op].target, tuple(arguments), options))
    return fx.GraphModule(root, graph)


def weight(*shape: int, seed: int = 5, **kind: Any) -> torch.nn.Parameter:
    """A random constant, of a given dtype."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) / 2
    return torch.nn.Parameter(values.to(**kind) if kind else values, requires_grad=False)


def normal(*shape: int, seed: int = 1) -> Tensor:
    return 2 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True, eq=False)
class Call:
    """One call of an op: its tensors and options."""

    op: str
    values: tuple[Any, ...]
    options: dict[str, Any]

    def __str__(self) -> str:
        shapes = [str(tuple(v.shape)).replace(" ", "") if isinstance(v, Tensor) else str(v)[:12] for v in self.values]
        options = [f"{key}={value}".replace(" ", "") for key, value in self.options.items()]
        return "-".join([self.op, *shapes, *options])

    @property
    def inputs(self) -> list[Tensor]:
        flat: list[Tensor] = []
        for value in self.values:
            parts = value if isinstance(value, (list, tuple)) else [value]
            flat += [v for v in parts if isinstance(v, Tensor) and not isinstance(v, torch.nn.Parameter)]
        return flat

    def check(self, engine: str, rtol: float = 2e-6, **options: Any) -> None:
        """Assert that the engine returns torch's shape, dtype, and values to `rtol` of the largest."""
        gm = single(self.op, *self.values, **self.options)
        written = write_onnx(gm, self.inputs, **options)
        onnx.checker.check_model(written.model, full_check=True)
        (got,) = ENGINES[engine](written.model, [self.inputs[i] for i in written.input_indices])
        same(got, gm(*self.inputs), rtol)


def same(got: Tensor, wanted: Tensor, rtol: float) -> None:
    """Assert equal shape and dtype, and equal values to `rtol` of the largest finite one."""
    assert got.shape == wanted.shape and got.dtype == wanted.dtype
    if not wanted.dtype.is_floating_point:
        assert torch.equal(got, wanted)
        return
    largest = wanted[wanted.isfinite()].abs().amax().item() if wanted.isfinite().any() else 0.0
    torch.testing.assert_close(got, wanted, rtol=0, atol=rtol * largest, equal_nan=True)


def call(op: str, *values: Any, **options: Any) -> Call:
    return Call(op, values, options)


def in_both(calls: Sequence[Call], lacking: dict[str, str] | None = None) -> Any:
    """Parametrize a test over calls and engines.

    Args:
        calls: the calls.
        lacking: reasons of expected failures, by the beginning of `engine-call`.
    """
    params = []
    for op_call in calls:
        for engine in ENGINES:
            name = f"{engine}-{op_call}"
            reason = next((why for begin, why in (lacking or {}).items() if name.startswith(begin)), None)
            marks = [pytest.mark.xfail(reason=reason)] if reason else []
            params.append(pytest.param(op_call, engine, id=name, marks=marks))
    return pytest.mark.parametrize(("call", "engine"), params)
