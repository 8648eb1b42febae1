"""What OpenVINO can be told of how it runs a model: the kernels of convolutions, and what it joins with them.

oneDNN, which is inside of it, has two kinds: convolutions as batches of matrix products ("brgconv"), which OpenVINO
takes wherever it can, and older ones ("jit"), which are faster at some sizes. What a layer of an OpenVINO model prefers
can be said in its file, for each layer: the attribute `primitives_priority`, which a version that does not know it, or
has no such kernel, passes over. Both kinds add integers exactly.

Chains of element-wise ops OpenVINO makes kernels of its own ("snippets"), before it looks which of them a convolution
can do. So a residual that is added to what a convolution makes becomes a snippet; without snippets, the convolution
adds it. Other chains are slower then.
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
"""The entry of a configuration; it is not among those that OpenVINO documents."""
JIT = "cpu:jit_avx512,cpu:jit_avx2"
"""The older kernels, as `primitives_priority` has them: the first that the machine has."""
ROUNDS, SECONDS = 3, 2.0
"""How often either kind is compiled and timed, and after which time no more: where memory lies makes a difference."""
GAIN = 0.03
"""A kernel that is faster by less is not another choice: times are not more exact than that."""


def in_jit(core: Any, model: Any, names: Collection[str]) -> Any:
    """A copy of an `openvino.Model` whose convolutions of these names run in jit kernels, where there are such."""
    from openvino import Tensor, serialize

    with tempfile.TemporaryDirectory() as folder:
        text, weights = Path(folder, "model.xml"), Path(folder, "model.bin")
        serialize(model, str(text), str(weights))
        root, data = ElementTree.parse(text).getroot(), np.fromfile(weights, np.uint8)
    for layer in root.iter("layer"):
        if layer.get("name") in names and _convolves(layer.get("type", "")):
            known = layer.find("rt_info")
            about = known if known is not None else ElementTree.SubElement(layer, "rt_info")
            ElementTree.SubElement(about, "attribute", name="primitives_priority", version="0", value=JIT)
    return core.read_model(ElementTree.tostring(root, encoding="unicode"), Tensor(data))


def _convolves(kind: str) -> bool:
    return kind.startswith(("Convolution", "GroupConvolution"))


def faster_in_jit(model: Any, compiled: Callable[..., Any], inputs: Sequence[Any]) -> tuple[str, ...]:
    """The names of the convolutions that run faster in jit kernels.

    Args:
        model: an `openvino.Model`.
        compiled: the model compiled, with times of its layers; with `jit=names`, those convolutions in jit kernels.
        inputs: arrays, as many as the model has inputs.
    """
    names = {op.friendly_name for op in model.get_ops() if _convolves(op.get_type_name())}
    plain, jit = dict[str, float](), dict[str, float]()
    end = time.perf_counter() + SECONDS
    for i in range(ROUNDS):
        if i and time.perf_counter() > end:
            break
        found = {name: us for name, us in _times(compiled(), inputs, "brg").items() if name in names}
        if not found:
            return ()
        _shortest(plain, found)
        _shortest(jit, _times(compiled(jit=tuple(found)), inputs, "jit"))
    return tuple(name for name, us in plain.items() if name in jit and jit[name] < (1 - GAIN) * us)


def faster_without_snippets(compiled: Callable[..., Any], inputs: Sequence[Any]) -> bool:
    """Whether a model that has snippets runs faster without them.

    Args:
        compiled: the model compiled; with `snippets=False`, without them.
        inputs: as for `faster_in_jit`.
    """
    found = {True: compiled()}
    if not _has_snippets(found[True]):
        return False
    found[False] = compiled(snippets=False)
    if _has_snippets(found[False]):  # this version cannot be told
        return False
    requests = {kind: _request(one, inputs) for kind, one in found.items()}
    times: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(_LEAST):  # cold
        for request in requests.values():
            request.infer()
    end = time.perf_counter() + _WHOLE_SECONDS
    while len(times[True]) < _LEAST or (len(times[True]) < 10 * _MOST and time.perf_counter() < end):
        for kind, request in requests.items():
            start = time.perf_counter()
            request.infer()
            times[kind].append(time.perf_counter() - start)
    return min(times[False]) < (1 - GAIN) * min(times[True])


def _has_snippets(compiled: Any) -> bool:
    nodes = [node.get_rt_info() for node in compiled.get_runtime_model().get_ordered_ops()]
    return any("layerType" in about and about["layerType"].astype(str) == "Subgraph" for about in nodes)


def _request(compiled: Any, inputs: Sequence[Any]) -> Any:
    from openvino import Tensor

    request = compiled.create_infer_request()
    for i, x in enumerate(inputs):
        request.set_input_tensor(i, Tensor(x, shared_memory=True))
    return request


def _shortest(known: dict[str, float], found: dict[str, float]) -> None:
    known.update({name: min(us, known.get(name, us)) for name, us in found.items()})


def _times(compiled: Any, inputs: Sequence[Any], kind: str) -> dict[str, float]:
    """Microseconds of the layers that run in one kind of kernels, by the names of the ops that each is made of."""
    request = _request(compiled, inputs)
    times, found = layer_times(request), {}
    for node in compiled.get_runtime_model().get_ordered_ops():
        about = {key: value.astype(str) for key, value in node.get_rt_info().items()}
        if about.get("primitiveType", "").startswith(kind) and node.friendly_name in times:
            found.update(dict.fromkeys(about.get("originalLayersNames", "").split(","), times[node.friendly_name]))
    return found


def layer_times(request: Any) -> dict[str, float]:
    """Microseconds that each layer of a request takes on average, by its name. The request has not run yet.

    It tells the average of all its runs, in whole microseconds, rounded down: half of one is added. The first run,
    which is cold, does not count.
    """
    request.infer()
    cold, runs, end = _averages(request), 1, time.perf_counter() + _SECONDS
    while runs <= _LEAST or (runs <= _MOST and time.perf_counter() < end):
        request.infer()
        runs += 1
    return {
        name: max(((average + 0.5) * runs - cold.get(name, 0.0)) / (runs - 1), 0.0)
        for name, average in _averages(request).items()
    }


_SECONDS, _LEAST, _MOST = 0.1, 3, 100
"""How long a request runs, and how often at least and at most, behind its first run."""
_WHOLE_SECONDS = 1.0
"""How long two forms of a whole model are compared."""


def _averages(request: Any) -> dict[str, float]:
    parts = (part for part in request.get_profiling_info() if part.status == part.Status.EXECUTED)
    return {part.node_name: 1e6 * part.real_time.total_seconds() for part in parts}
