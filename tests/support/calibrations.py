"""Helpers of calibration tests: a network, data in shares, and the state that calibration leaves in a model."""

import torch
from torch import nn

import fxq
from fxq.calibration.calibration_state import observers_of
from fxq.workflow.calibrate import graphs_of


def network():
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=4), nn.Flatten(), nn.Linear(288, 4)
    return nn.Sequential(*layers).eval()


def data(count=11, size=3):
    """Batches of growing range, so that each of them counts."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(size, 3, 8, 8, generator=generator) * (i + 1) for i in range(count)]


def recipe(observer="histogram", **options):
    activation = fxq.TensorSpec(observer=observer)
    return fxq.Recipe.static(activation=activation, backend="reference", optimize="coverage", **options)


def prepared(observer="histogram", model=None, **options):
    return fxq.prepare(model or network(), recipe(observer), example_inputs=data()[0], **options)


def seen(observed):
    """All that calibration leaves in a model."""
    graph_states = []
    for graph in graphs_of(observed):
        states = {
            name: (dict(observer.named_buffers()), observer.constants, observer.block, observer.met_empty)
            for name, observer in observers_of(graph).items()
        }
        samples = [(b.args, dict(b.kwargs)) for b in graph.manager.context.samples]
        graph_states.append((states, samples, graph.batches_seen))
    return graph_states


def same(a, b):
    """Whether nested values are the same, tensors bit for bit."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return a == b


def whole(batches, observer="histogram"):
    """State of one process that has seen all batches."""
    return seen(fxq.calibrate(prepared(observer), batches))


def in_turns(shares):
    return [share[i] for i in range(max(map(len, shares))) for share in shares if i < len(share)]


SHARES = {
    "unequal": [data(9)[:5], data(9)[5:6], data(9)[6:]],
    "one rank has nothing": [[], data(9)[:4], data(9)[4:]],
    "all on one": [[], [], data(9)],
    "batches of all sizes": [[data(3, size)[2] for size in sizes] for sizes in ([7, 1, 1, 30], [1] * 40, [2, 33, 4])],
}


def other_weights():
    model = network()
    with torch.no_grad():
        model[2].weight[0, 0, 0, 0] += 1
    return model


def calibrated(path, batches, observer="histogram", **options):
    return fxq.calibrate(prepared(observer), batches, checkpoint=path, every=0, **options)
