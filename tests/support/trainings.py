"""Helpers for tests of training: recipes, a few steps, and the values of both models side by side."""

import torch

import fxq
from fxq.common.data import Batch
from fxq.common.metrics import tensors
from fxq.graph.run import Runner
from fxq.quant.fake_quantize import FakeQuantizeValue

QAT = fxq.Recipe.qat(backend="reference")
W4 = fxq.TensorSpec(bits=4, signed=True, symmetric=True, per="channel", observer="minmax")


def prepared(model, inputs, recipe=QAT):
    """The model to train."""
    return fxq.prepare(model, recipe, example_inputs=inputs)


def called(model, inputs):
    """Run a model on a batch in any of its spellings, with gradients."""
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, (tuple, list)) else model(inputs)


def trained(model, batches, rate=1e-2, run=None):
    """Losses of one training step on each batch: the mean square of the output."""
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    losses = []
    for inputs in batches:
        optimizer.zero_grad()
        outputs = tensors(called(model if run is None else run, inputs))
        loss = sum(value.square().mean() for value in outputs if value.is_floating_point())
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def nodes(model):
    """The nodes of a graph that call something, as `name: what(arguments)`."""
    targets = []
    for node in model.graph.nodes:
        if node.op in ("call_function", "call_module"):
            target_name = getattr(node.target, "__name__", node.target)
            targets.append(f"{node.name}: {target_name}({', '.join(str(arg) for arg in node.args)})")
    return targets


def rounded_values(model, inputs):
    """Output of each fake quantizer of activations, with its scale, in order."""
    model.use_ranges()
    runner, rounded = Runner(model, Batch((inputs,)) if isinstance(inputs, torch.Tensor) else inputs), []
    with torch.no_grad():
        for node in model.graph.nodes:
            value = runner.step(node)
            module = model.get_submodule(node.target) if node.op == "call_module" else None
            if isinstance(module, FakeQuantizeValue):
                rounded.append((module.qparams().s, value))
    return rounded
