"""Tuning of OpenVINO models: the kernels of convolutions, and whether element-wise ops become snippets.

oneDNN, which OpenVINO includes, has two kinds of convolution kernels: batches of matrix products ("brgconv"), which
OpenVINO prefers, and older ones ("jit"), which are faster at some sizes. The attribute `primitives_priority` of a layer
in a model file selects one. A version that does not know the attribute, or has no such kernel, ignores it. Both kinds
add integers exactly.

OpenVINO compiles chains of element-wise ops to kernels of its own ("snippets") before it fuses ops into convolutions.
So the addition of a residual to the result of a convolution becomes a snippet; without snippets, the convolution adds
it. Other chains are slower then.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np

NO_SNIPPETS = {"SNIPPETS_MODE": "DISABLE"}
"""Undocumented entry of a configuration that disables snippets."""
JIT_PRIORITY = "cpu:jit_avx512,cpu:jit_avx2"
"""Value of `primitives_priority` for "jit" kernels: the first that the CPU supports is used."""
MAX_TUNING_ROUNDS, MAX_TUNING_SECONDS = 3, 1.0
"""How often each kind of kernels is compiled and timed, and after which time no more: times depend on memory addresses.
"""
MIN_GAIN = 0.03
"""Relative gain below which kernels are not changed: times are not more precise."""


def in_jit(core: Any, model: Any, names: Collection[str]) -> Any:
    """Return a copy of an `openvino.Model` whose convolutions of these names run in "jit" kernels."""
    from openvino import Tensor, serialize

    with tempfile.TemporaryDirectory() as folder:
        text, weights = Path(folder, "model.xml"), Path(folder, "model.bin")
        serialize(model, str(text), str(weights))
        root, data = ElementTree.parse(text).getroot(), np.fromfile(weights, np.uint8)
    for layer in root.iter("layer"):
        if layer.get("name") in names and _is_convolution(layer.get("type", "")):
            runtime_info = layer.find("rt_info")
            runtime_element = runtime_info if runtime_info is not None else ElementTree.SubElement(layer, "rt_info")
            ElementTree.SubElement(
                runtime_element, "attribute", name="primitives_priority", version="0", value=JIT_PRIORITY
            )
    return core.read_model(ElementTree.tostring(root, encoding="unicode"), Tensor(data))


def _is_convolution(kind: str) -> bool:
    """Whether a layer type of OpenVINO is a convolution."""
    return kind.startswith(("Convolution", "GroupConvolution"))


def faster_in_jit(model: Any, compiled: Callable[..., Any], inputs: Sequence[Any]) -> tuple[str, ...]:
    """Names of the convolutions that run faster in "jit" kernels.

    Args:
        model: An `openvino.Model`.
        compiled: Function that compiles the model with times of its layers; with `jit=names`, those convolutions in
            "jit" kernels.
        inputs: Arrays, one for each input of the model.
    """
    names = {op.friendly_name for op in model.get_ops() if _is_convolution(op.get_type_name())}
    plain, jit = dict[str, float](), dict[str, float]()
    end = time.perf_counter() + MAX_TUNING_SECONDS
    for i in range(MAX_TUNING_ROUNDS):
        if i and time.perf_counter() > end:
            break
        brgconv_times = {name: us for name, us in _kernel_times(compiled(), inputs, "brg").items() if name in names}
        if not brgconv_times:
            return ()
        _keep_shortest(plain, brgconv_times)
        _keep_shortest(jit, _kernel_times(compiled(jit=tuple(brgconv_times)), inputs, "jit"))
    return tuple(name for name, us in plain.items() if name in jit and jit[name] < (1 - MIN_GAIN) * us)


def faster_without_snippets(compiled: Callable[..., Any], inputs: Sequence[Any]) -> bool:
    """Whether a model that has snippets runs faster without them.

    Args:
        compiled: Function that compiles the model; with `snippets=False`, without snippets.
        inputs: Arrays, one for each input of the model.
    """
    models = {True: compiled()}
    if not _has_snippets(models[True]):
        return False
    models[False] = compiled(snippets=False)
    if _has_snippets(models[False]):  # this version cannot disable them
        return False
    requests = {has_snippets: _request(model, inputs) for has_snippets, model in models.items()}
    times: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(_MIN_RUNS):  # warm-up
        for request in requests.values():
            request.infer()
    end = time.perf_counter() + _MAX_COMPARISON_SECONDS
    while len(times[True]) < _MIN_RUNS or (len(times[True]) < 10 * _MAX_RUNS and time.perf_counter() < end):
        for has_snippets, request in requests.items():
            start = time.perf_counter()
            request.infer()
            times[has_snippets].append(time.perf_counter() - start)
    return min(times[False]) < (1 - MIN_GAIN) * min(times[True])


def _has_snippets(compiled: Any) -> bool:
    """Whether a compiled model has snippets."""
    nodes = [node.get_rt_info() for node in compiled.get_runtime_model().get_ordered_ops()]
    return any("layerType" in attributes and attributes["layerType"].astype(str) == "Subgraph" for attributes in nodes)


def _request(compiled: Any, inputs: Sequence[Any]) -> Any:
    """Request of a compiled model whose inputs are bound to arrays."""
    from openvino import Tensor

    request = compiled.create_infer_request()
    for i, x in enumerate(inputs):
        request.set_input_tensor(i, Tensor(x, shared_memory=True))
    return request


def _keep_shortest(shortest: dict[str, float], times: dict[str, float]) -> None:
    """Update times by name with shorter ones."""
    shortest.update({name: min(us, shortest.get(name, us)) for name, us in times.items()})


def _kernel_times(compiled: Any, inputs: Sequence[Any], kind: str) -> dict[str, float]:
    """Microseconds of the layers that run in one kind of kernels, by the names of the ops that were fused into each."""
    request = _request(compiled, inputs)
    times, kernel_times = layer_times(request), {}
    for node in compiled.get_runtime_model().get_ordered_ops():
        attributes = {key: value.astype(str) for key, value in node.get_rt_info().items()}
        if attributes.get("primitiveType", "").startswith(kind) and node.friendly_name in times:
            kernel_times.update(
                dict.fromkeys(attributes.get("originalLayersNames", "").split(","), times[node.friendly_name])
            )
    return kernel_times


def layer_times(request: Any) -> dict[str, float]:
    """Average microseconds of each layer of a request, by its name. The request must not have run yet.

    OpenVINO reports the average of all runs in whole microseconds, rounded down; half a microsecond is added. The first
    run is warm-up and does not count.
    """
    request.infer()
    cold, runs, end = _averages(request), 1, time.perf_counter() + _MAX_REQUEST_SECONDS
    while runs <= _MIN_RUNS or (runs <= _MAX_RUNS and time.perf_counter() < end):
        request.infer()
        runs += 1
    return {
        name: max(((average + 0.5) * runs - cold.get(name, 0.0)) / (runs - 1), 0.0)
        for name, average in _averages(request).items()
    }


_MAX_REQUEST_SECONDS, _MIN_RUNS, _MAX_RUNS = 0.1, 3, 100
"""Time that a request is run for, and minimum and maximum number of runs after the warm-up."""
_MAX_COMPARISON_SECONDS = 0.5
"""Time that two forms of a whole model are compared for."""


def _averages(request: Any) -> dict[str, float]:
    """OpenVINO's average microseconds of each layer that ran."""
    parts = (part for part in request.get_profiling_info() if part.status == part.Status.EXECUTED)
    return {part.node_name: 1e6 * part.real_time.total_seconds() for part in parts}
