"""What coverage.py looks at where an engine runs the model: its regions, and what stays in PyTorch beside them."""

from __future__ import annotations

from collections import Counter
from functools import cache

from torch import fx

import fxq
from fxq.backends.by_name import get_backend
from fxq.backends.engines.engine import EngineBackend, EngineKernel
from fxq.graph.info import info
from fxq.graph.query import called_name, plan_of, submodule, taken_from
from fxq.graph.region import is_weight
from fxq.graph.unit import calls_of

ENGINES = ("openvino", "onnxruntime")


@cache
def _engine(name: str) -> EngineBackend:
    backend = get_backend(name)
    assert isinstance(backend, EngineBackend)
    return backend


def is_engine(backend: str) -> bool:
    """Whether the backend of this name hands regions to an engine."""
    return backend in ENGINES


def regions(qmodel: fxq.QuantizedModel) -> int:
    """How many kernels of an engine the model has."""
    return sum(isinstance(submodule(qmodel, node), EngineKernel) for node in qmodel.graph.nodes)


def outside(qmodel: fxq.QuantizedModel, backend: str) -> dict[str, int]:
    """What computes tensors in PyTorch, as `op: why the engine does not take it`, with how often; most first."""
    found: Counter[str] = Counter()
    for node in qmodel.graph.nodes:
        in_kernel = isinstance(submodule(qmodel, taken_from(node)), EngineKernel)
        if node.op.startswith("call_") and info(node).is_tensor and not (in_kernel or is_weight(node)):
            found[f"{_name(qmodel, node)}: {_why(qmodel, node, backend)}"] += 1
    return dict(found.most_common())


def _name(qmodel: fxq.QuantizedModel, node: fx.Node) -> str:
    module = submodule(qmodel, node)
    calls = calls_of(qmodel, node)
    return calls[0].op.name if calls else called_name(node) if module is None else type(module).__name__


def _why(qmodel: fxq.QuantizedModel, node: fx.Node, backend: str) -> str:
    plan = plan_of(node)
    if plan is not None and (plan.decision.kind == "unverified" or not calls_of(qmodel, node)):
        return plan.decision.text.partition("\n")[0][:80]
    return _engine(backend).refusal(qmodel, node) or "nothing beside it computes"
