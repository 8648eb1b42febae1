"""Writer of graphs: the text at each stage, and graphs that cannot be written."""

import pytest
import torch
from torch import fx, nn

import fxq
from fxq.backends.by_name import kernel_named
from fxq.graph.info import NodeInfo
from fxq.graph.text.text_reader import read
from fxq.graph.text.text_writer import FACTS
from fxq.quant.observer_base import Observer
from tests.support.graphs import expected, graph, program
from tests.support.helpers import REFERENCE, module

IMAGE = torch.linspace(-1, 1, 64).reshape(1, 1, 8, 8)


def head(self, x):
    y = torch.flatten(torch.max_pool2d(self.conv(x).relu(), 2), 1)
    return {"logits": self.fc(y), "size": y.shape[1]}


def network():
    return module(head, conv=nn.Conv2d(1, 2, 3, stride=2), fc=nn.Linear(2, 3, bias=False))


@pytest.mark.any_cpu
def test_a_canonical_graph():
    gm = graph(network(), IMAGE)
    assert program(gm) == expected("""
        x: float32[1, 1, 8, 8] = input()
        conv_weight: float32[2, 1, 3, 3] = tensor('conv.weight')
        conv_bias: float32[2] = tensor('conv.bias')
        conv: float32[1, 2, 3, 3] = conv2d(x, conv_weight, conv_bias, stride=(2, 2))
        relu: float32[1, 2, 3, 3] = relu(conv)
        max_pool2d: float32[1, 2, 1, 1] = max_pool2d(relu, kernel_size=(2, 2), stride=(2, 2))
        flatten: float32[1, 2] = flatten(max_pool2d, start_dim=1)
        fc_weight: float32[3, 2] = tensor('fc.weight')
        fc: float32[1, 3] = linear(flatten, fc_weight)
        getattr_1 = getattr(flatten, 'shape')
        getitem = operator.getitem(getattr_1, 1)
        return {'logits': fc, 'size': getitem}
    """)
    assert fxq.extend.write_graph(gm).splitlines()[3].endswith("  # 'conv', 'text/test_text_writer.py:20'")
    assert set(fxq.extend.graph_tensors(gm)) == {"conv.weight", "conv.bias", "fc.weight"}
    assert fxq.extend.graph_tensors(gm)["fc.weight"] is gm.fc.weight


@pytest.mark.any_cpu
def test_units_stand_first():
    shown = program(graph(network(), IMAGE, until="fuse")).splitlines()
    assert shown[:5] == [
        "def conv2d_relu(x, weight, bias):",
        "    conv2d = conv2d(x, weight, bias, stride=(2, 2))",
        "    relu = relu(conv2d)",
        "    return relu",
        "",
    ]
    assert "conv_relu: float32[1, 2, 3, 3] = conv2d_relu(x, conv_weight, conv_bias)" in shown


@pytest.mark.any_cpu
def test_a_complete_text_says_what_follows_from_the_program():
    gm = graph(network(), IMAGE, until="fuse")
    said = "values=(((1, 2, 3, 3), torch.float32), ((1, 2, 3, 3), torch.float32))"
    text = fxq.extend.write_graph(gm, complete=True)
    assert said in text and "values=" not in fxq.extend.write_graph(gm)
    tensors = fxq.extend.graph_tensors(gm)
    again = read(text, tensors, {}, kernel_named, complete=True)
    assert fxq.extend.write_graph(again) == fxq.extend.write_graph(gm)
    wrong = text.replace("conv_relu: float32[1, 2, 3, 3]", "conv_relu: float32[1, 2, 3, 4]")
    read(wrong, tensors, {}, kernel_named, complete=True)
    with pytest.raises(fxq.InputError, match="the line says float32"):
        read(wrong, tensors, {}, kernel_named)
    huge = text.replace("conv_relu: float32[1, 2, 3, 3]", "conv_relu: float32[4000000000, 4000000000]")
    with pytest.raises(fxq.InputError, match="a tensor cannot be as large as"):
        read(huge, tensors, {}, kernel_named, complete=True)


@pytest.mark.any_cpu
def test_observers_and_their_buffers():
    gm = graph(network(), IMAGE, until="insert-observers")
    declared = program(gm).splitlines()[5]
    assert declared.startswith("modules['fxq_observers.x'] = observer(spec=TensorSpec(), axis=None, name=")
    assert "minimum=tensor('fxq_observers.x.minimum')" in declared
    assert "fxq_observers.x.minimum" in fxq.extend.graph_tensors(gm)


@pytest.mark.any_cpu
def test_the_observer_of_a_weight_is_read_back_paused():
    gm = graph(network(), IMAGE, until="insert-observers")
    again = fxq.extend.read_graph(program(gm), fxq.extend.graph_tensors(gm))
    paused = [module.paused for module in again.modules() if isinstance(module, Observer)]
    assert paused == [False, True, False, False, True]  # x, a weight, two activations, the other weight
    again(IMAGE)
    seen = {module.name: module.seen for module in again.modules() if isinstance(module, Observer)}
    assert [seen for name, seen in seen.items() if name.startswith("the weight")] == [False, False]


@pytest.mark.any_cpu
def test_units_of_one_kind_and_of_the_name_of_an_op():
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Conv2d(2, 2, 3, padding=1), nn.ReLU()).eval()
    gm = graph(model, IMAGE, until="fuse")
    shown = program(gm)
    assert "def conv2d_relu(x, weight, bias):\n" in shown
    assert "def conv2d_relu_1(x, weight, bias):  # 'conv2d_relu'\n" in shown
    for name in ("relu", "class", "getattr", "a-b"):
        gm.fxq_units.add_module(name, gm.get_submodule("fxq_units.conv2d_relu"))
        next(n for n in gm.graph.nodes if n.op == "call_module").target = f"fxq_units.{name}"
        again = fxq.extend.read_graph(program(gm), fxq.extend.graph_tensors(gm))
        assert program(again) == program(gm) and torch.equal(again(IMAGE), model(IMAGE))


def mine(x):
    return x * 2


@pytest.mark.any_cpu
def test_what_no_text_can_name():
    gm = graph(module(lambda self, x: torch.relu(x)), IMAGE)
    relu = next(n for n in gm.graph.nodes if n.name == "relu")
    relu.target = mine
    with pytest.raises(fxq.InputError, match=r"%relu \(call_function.*calls <function mine.*neither an op"):
        fxq.extend.write_graph(gm)
    relu.target, relu.kwargs = torch.relu, {"x": {1, 2}}
    with pytest.raises(fxq.InputError, match=r"%relu .*holds a set"):
        fxq.extend.write_graph(gm)


@pytest.mark.any_cpu
def test_a_graph_that_fxq_did_not_make():
    gm = fx.symbolic_trace(module(lambda self, x, y=2.0: torch.logsumexp(x, 1).view(-1) * y))
    shown = program(gm)
    assert shown == expected("""
        x = input()
        y = input(default=2.0)
        logsumexp = torch.logsumexp(x, 1)
        view = logsumexp.view(-1)
        mul = operator.mul(view, y)
        return mul
    """)
    assert torch.equal(fxq.extend.read_graph(shown, {})(IMAGE), gm(IMAGE))


def test_a_quantized_model():
    qmodel = fxq.quantize(network(), REFERENCE, data=[IMAGE])
    restored = fxq.extend.read_graph(fxq.extend.write_graph(qmodel), fxq.extend.graph_tensors(qmodel))
    assert torch.equal(restored(IMAGE)["logits"], qmodel(IMAGE)["logits"])
    assert all(tensor.device.type == "cpu" for tensor in fxq.extend.graph_tensors(qmodel).values())


def test_every_field_of_the_metadata_is_written():
    names = {("", name) for name in NodeInfo._fields}
    for record in ("traced", "fused", "lowered"):
        names |= {(record, name) for name in getattr(NodeInfo(), record)._fields}
        names.remove(("", record))
    names -= {("", name) for name in ("shape", "dtype", "made_by")}
    assert {(record, name) for name, record in FACTS.items()} == names
