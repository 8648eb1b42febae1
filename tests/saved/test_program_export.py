"""`.pt2` files: PyTorch's own ops with integer weights, the same numbers in a process without fxq, any batch."""

import copy
import json
import subprocess
import sys
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from torch import nn

import fxq
from fxq.common.metrics import tensors
from fxq.errors import ExportError, InputError, RenderError
from fxq.quant.quantized_rows import QuantizedRows
from fxq.quant.spec import CACHE
from fxq.saved import program_export
from tests.support.helpers import REFERENCE, module

pytestmark = pytest.mark.any_cpu

ELSEWHERE = """
import json, sys, torch
from torch.utils._pytree import tree_leaves
program = torch.export.load(sys.argv[1])
inputs, wanted = torch.load(sys.argv[2])
run = program.module()
far = [max(float((a - b).abs().max()) for a, b in zip(tree_leaves(run(*x)), y, strict=True))
       for x, y in zip(inputs, wanted, strict=True)]
kinds = sorted({str(node.target) for node in program.graph.nodes if node.op == "call_function"})
dtypes = sorted({str(value.dtype) for value in [*program.state_dict.values(), *program.constants.values()]})
print(json.dumps({"far": far, "kinds": kinds, "dtypes": dtypes, "fxq": "fxq" in sys.modules}))
"""
"""Script that prints, for an exported program: differences of its outputs, its functions, dtypes of its tensors."""


def elsewhere(path, qmodel, *inputs):
    """The program in a process without fxq, in a folder where it is not found."""
    place = path.with_suffix(".inputs")
    torch.save((inputs, [[y.detach() for y in tensors(qmodel(*x))] for x in inputs]), place)
    code = [sys.executable, "-I", "-c", ELSEWHERE, str(path), str(place)]
    return json.loads(subprocess.run(code, capture_output=True, text=True, check=True, cwd=path.parent).stdout)


def images(n):
    return torch.rand(n, 3, 12, 12, generator=torch.Generator().manual_seed(n))


def convolutions():
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(800, 4)
    return nn.Sequential(*layers).eval()


@cache
def quantized_once():
    return fxq.quantize(convolutions(), REFERENCE, data=[images(2)])


def quantized():
    """A copy of a model that is quantized once."""
    return copy.deepcopy(quantized_once())


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.names, self.memory, self.end = nn.Embedding(10, 8), nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, ids):
        y, state = self.memory(self.names(ids))
        return self.end(y), state


@pytest.mark.slow
def test_a_process_without_fxq_computes_the_same(tmp_path):
    qmodel = quantized()
    differences = elsewhere(qmodel.export(tmp_path / "new" / "m.pt2"), qmodel, *[(images(n),) for n in (1, 2, 7)])
    assert differences["far"] == [0, 0, 0] and not differences["fxq"]
    assert all(kind.startswith("aten.") for kind in differences["kinds"])
    assert {"torch.int8", "torch.int32"} <= set(differences["dtypes"])


@pytest.mark.slow
def test_recurrent_layers_and_embeddings(tmp_path):
    torch.manual_seed(0)
    ids = torch.randint(0, 10, (6, 5))
    qmodel = fxq.quantize(Recurrent().eval(), fxq.Recipe.dynamic(backend="reference"), data=[ids[:2]])
    differences = elsewhere(qmodel.export(tmp_path / "m.pt2"), qmodel, (ids[:2],), (ids,))
    assert differences["far"] == [0, 0]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("recipe", [fxq.Recipe.weight_only(), fxq.Recipe.dynamic(), fxq.Recipe.static()])
def test_whatever_a_model_was_made_for(recipe, tmp_path):
    """Kernels of this machine give their place to what they compute."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4)).eval()
    qmodel = fxq.quantize(model, recipe.with_optimize("coverage"), data=[torch.rand(3, 64)])
    program = torch.export.load(qmodel.export(tmp_path / "m.pt2")).module()
    x = torch.rand(5, 64)
    step = float(qmodel(x).abs().max()) / 127  # a tie of rounding may go the other way in a kernel
    torch.testing.assert_close(program(x), qmodel(x), rtol=0, atol=2 * step)


def test_a_batch_of_one_is_no_fixed_size(tmp_path):
    qmodel = fxq.quantize(convolutions(), REFERENCE, data=[images(1)])
    program = torch.export.load(qmodel.export(tmp_path / "m.pt2")).module()
    for x in (images(1), images(5)):
        assert torch.equal(program(x), qmodel(x))


@pytest.mark.slow
def test_a_fixed_batch(tmp_path):
    qmodel = quantized()
    program = torch.export.load(qmodel.export(tmp_path / "m.pt2", dynamic=False)).module()
    assert torch.equal(program(images(2)), qmodel(images(2)))
    with pytest.raises(Exception, match="2"):  # torch's own words for another size
        program(images(3))


def test_named_axes(tmp_path):
    model = module(lambda self, x, mask: self.layer(x) * mask, layer=nn.Linear(4, 4))
    data = {"x": torch.rand(2, 5, 4), "mask": torch.rand(2, 5, 1)}
    qmodel = fxq.quantize(model, REFERENCE, data=[data])
    axes = {0: "batch", 1: "length"}
    path = qmodel.export(tmp_path / "m.pt2", example_inputs=data, dynamic={"x": axes, "mask": axes})
    larger = {"x": torch.rand(3, 9, 4), "mask": torch.rand(3, 9, 1)}
    assert torch.equal(torch.export.load(path).module()(**larger), qmodel(**larger))
    with pytest.raises(InputError, match="unknown input 'y'"):
        qmodel.export(path, example_inputs=data, dynamic={"y": axes})


@pytest.mark.slow
def test_sizes_that_are_sums_of_others(tmp_path):
    """Sizes 0 and 1 of the example are no fixed sizes."""

    def example_of(batch, past, new):
        return {
            "past": torch.rand(batch, past, 4),
            "new": torch.rand(batch, new, 4),
            "mask": torch.rand(batch, past + new),
        }

    def forward(self, past, new, mask):
        return self.layer(torch.cat([past, new], 1)) * mask[..., None]

    qmodel = fxq.quantize(module(forward, layer=nn.Linear(4, 4)), REFERENCE, data=[example_of(2, 1, 3)])
    axes = {"past": {0: "n", 1: "past"}, "new": {0: "n", 1: "new"}, "mask": {0: "n", 1: "past + new"}}
    path = qmodel.export(tmp_path / "m.pt2", example_inputs=example_of(1, 0, 1), dynamic=axes)
    program = torch.export.load(path).module()
    for sizes in ((1, 0, 1), (3, 1, 1), (2, 5, 0)):
        inputs = example_of(*sizes)
        assert torch.equal(program(**inputs), qmodel(**inputs))


def test_random_numbers(tmp_path):
    model = module(lambda self, x: torch.normal(0.0, 1.0, (4,)) + self.layer(x), layer=nn.Linear(4, 4))
    x = torch.rand(2, 4)
    qmodel = fxq.quantize(model, REFERENCE, data=[x])
    program = torch.export.load(qmodel.export(tmp_path / "m.pt2", dynamic=False)).module()
    results = []
    for form in (qmodel, program, fxq.load(qmodel.save(tmp_path / "m.fxq"))):
        torch.manual_seed(3)
        results += [form(x), form(x)]
    assert not torch.equal(results[0], results[1])
    assert all(torch.equal(results[i], results[i % 2]) for i in range(6))


@dataclass
class Answer:
    scores: torch.Tensor
    best: torch.Tensor


def test_an_object_becomes_a_mapping(tmp_path):
    def forward(self, x):
        y = self.layer(x)
        return Answer(y, y.argmax(1))

    qmodel = fxq.quantize(module(forward, layer=nn.Linear(4, 3)), REFERENCE, data=[torch.rand(2, 4)])
    x = torch.rand(5, 4)
    got, wanted = torch.export.load(qmodel.export(tmp_path / "m.pt2")).module()(x), qmodel(x)
    assert set(got) == {"scores", "best"} and torch.equal(got["scores"], wanted.scores)


@pytest.mark.parametrize("spec", [CACHE, fxq.TensorSpec(bits=4, per=8, range="dynamic")], ids=["8 bits", "4 bits"])
def test_a_state_in_integers_becomes_a_state_in_float(tmp_path, spec):
    """The program takes and returns its values, which it quantizes again: to the same integers, up to rounding."""

    def forward(self, x, past):
        keys = torch.cat([past, self.layer(x)], 1)
        return torch.softmax(x @ keys.transpose(1, 2), -1) @ keys, keys

    model = module(forward, layer=nn.Linear(16, 16)).eval()
    x, past = torch.randn(2, 3, 16), torch.randn(2, 5, 16)
    qmodel = fxq.quantize(model, fxq.Recipe.weight_only(backend="reference", state=spec), example_inputs=(x, past))
    _, state = qmodel(x, past)
    sizes = {"x": {0: "batch", 1: "new"}, "past": {0: "batch", 1: "old"}}
    path = qmodel.export(tmp_path / "m.pt2", dynamic=sizes, example_inputs=(x, state))
    program, (got, keys) = torch.export.load(path).module(), (None, past)
    for part in torch.randn(2, 6, 16).split([2, 3, 1], 1):  # a call, and two with the state of the call before
        (wanted, past), (got, keys) = qmodel(part, past), program(part, keys)
        assert type(keys) is torch.Tensor and type(past) is QuantizedRows
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-5)
        torch.testing.assert_close(keys, past.dequantize(), rtol=0, atol=1e-5)


@pytest.mark.slow
def test_sizes_from_a_smallest_one_on(tmp_path):
    layers = nn.Conv2d(3, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 5, stride=2), nn.AdaptiveAvgPool2d(1)
    x, larger = torch.rand(2, 3, 24, 24), torch.rand(1, 3, 31, 19)
    qmodel = fxq.quantize(nn.Sequential(*layers).eval(), fxq.Recipe.static(backend="reference"), data=[x])
    sizes = {"input": {0: "batch", 2: "height", 3: "width"}}
    program = torch.export.load(qmodel.export(tmp_path / "m.pt2", example_inputs=x, dynamic=sizes)).module()
    assert torch.equal(program(larger), qmodel(larger))
    with pytest.raises(AssertionError, match="Guard failed"):
        program(torch.rand(1, 3, 4, 4))


def test_a_size_that_the_model_takes_for_granted(tmp_path):
    """It is named, and nothing is written."""
    model = module(lambda self, x: self.layer(x).reshape(2, -1), layer=nn.Linear(4, 4))
    qmodel = fxq.quantize(model, REFERENCE, data=[torch.rand(2, 3, 4)])
    with pytest.raises(ExportError, match=r"does not take the model with 'batch' of another size\. Export it with dyn"):
        qmodel.export(tmp_path / "m.pt2", dynamic={"x": {0: "batch"}})
    assert not (tmp_path / "m.pt2").exists()
    assert qmodel.export(tmp_path / "m.pt2", dynamic=False).exists()


@pytest.mark.slow
def test_no_file_of_this_machine_is_named(tmp_path):
    qmodel = quantized()
    assert __file__.encode() not in qmodel.export(tmp_path / "m.pt2").read_bytes()


def test_the_model_stays_as_it_is(tmp_path):
    qmodel = quantized()
    before, code = qmodel(images(2)), qmodel.code
    qmodel.export(tmp_path / "m.pt2")
    assert torch.equal(qmodel(images(2)), before) and qmodel.code == code


def test_a_program_that_computes_otherwise_is_not_written(tmp_path, monkeypatch):
    qmodel = quantized()
    monkeypatch.setattr(program_export, "identical", lambda got, wanted: False)
    with pytest.raises(ExportError, match=r"m\.pt2: the program computes something else than the quantized model"):
        qmodel.export(tmp_path / "m.pt2")
    assert not (tmp_path / "m.pt2").exists()
    assert qmodel.export(tmp_path / "m.pt2", check=False).exists()


def test_a_file_that_cannot_be_written(tmp_path):
    qmodel = quantized()
    (tmp_path / "file").write_text("")
    with pytest.raises(RenderError, match=r"cannot write .*m\.pt2"):
        qmodel.export(tmp_path / "file" / "m.pt2")
