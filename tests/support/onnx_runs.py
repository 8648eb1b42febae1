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


def run_onnxruntime(model: Any, inputs: Sequence[Tensor], optimized: bool = False) -> list[Tensor]:
    """What ONNX Runtime makes of a model, node by node as it is written, or as it joins them."""
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    if not optimized:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.add_session_config_entry("session.x64quantprecision", "1")
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    given = {arg.name: x.numpy() for arg, x in zip(session.get_inputs(), inputs, strict=True)}
    return [torch.from_numpy(y) for y in session.run(None, given)]


@cache
def _core() -> Any:
    return openvino.Core()


def run_openvino(model: Any, inputs: Sequence[Tensor]) -> list[Tensor]:
    """What OpenVINO makes of a model."""
    settings = {"INFERENCE_NUM_THREADS": 1, "INFERENCE_PRECISION_HINT": "f32"}
    compiled = _core().compile_model(_core().read_model(model.SerializeToString()), "CPU", settings)
    given = {arg.name: x.numpy() for arg, x in zip(model.graph.input, inputs, strict=True)}
    read = [given[next(iter(port.names & given.keys()))] for port in compiled.inputs]  # not those that nothing reads
    request = compiled.create_infer_request()
    made = request.infer(read)
    return [torch.from_numpy(made[out].copy()) for out in compiled.outputs]


ENGINES: dict[str, Callable[..., list[Tensor]]] = {"onnxruntime": run_onnxruntime, "openvino": run_openvino}


def single(op: str, *values: Any, **options: Any) -> fx.GraphModule:
    """A graph of one call of an op: tensors (and lists of them) are its inputs, weights (`Parameter`) its constants."""
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
    """A constant: random, or of integers."""
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) / 2
    return torch.nn.Parameter(made.to(**kind) if kind else made, requires_grad=False)


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
        """The engine gives what torch gives: shape, type, and values to `rtol` of the largest."""
        gm = single(self.op, *self.values, **self.options)
        written = write_onnx(gm, self.inputs, **options)
        onnx.checker.check_model(written.model, full_check=True)
        (got,) = ENGINES[engine](written.model, [self.inputs[i] for i in written.input_indices])
        same(got, gm(*self.inputs), rtol)


def same(got: Tensor, wanted: Tensor, rtol: float) -> None:
    """Shape, type and values, to `rtol` of the largest finite one."""
    assert got.shape == wanted.shape and got.dtype == wanted.dtype
    if not wanted.dtype.is_floating_point:
        assert torch.equal(got, wanted)
        return
    largest = wanted[wanted.isfinite()].abs().amax().item() if wanted.isfinite().any() else 0.0
    torch.testing.assert_close(got, wanted, rtol=0, atol=rtol * largest, equal_nan=True)


def call(op: str, *values: Any, **options: Any) -> Call:
    return Call(op, values, options)


def in_both(calls: Sequence[Call], lacking: dict[str, str] | None = None) -> Any:
    """Parametrizes a test over calls and engines.

    Args:
        calls: the calls.
        lacking: calls (by the beginning of `engine-call`) that an engine does not compute, or wrongly, and why.
    """
    found = []
    for each in calls:
        for engine in ENGINES:
            name = f"{engine}-{each}"
            reason = next((why for begin, why in (lacking or {}).items() if name.startswith(begin)), None)
            marks = [pytest.mark.xfail(reason=reason)] if reason else []
            found.append(pytest.param(each, engine, id=name, marks=marks))
    return pytest.mark.parametrize(("call", "engine"), found)
