"""annotate: layers whose values decide the size of another value stay in float."""

import onnx.parser
import pytest
import torch
from torch import nn

import fxq
from fxq.common.metrics import sqnr
from tests.support.helpers import REFERENCE, module

WHY = "its values decide how many entries %{} has, so rounding would change it"


def repeated(self, x):
    """Each row as often as its duration says, at least once."""
    h = torch.relu(self.before(x))
    durations = self.duration(h).exp().ceil().flatten()
    return self.after(self.repeat(h, durations))


def by_repeating(h, durations):
    return torch.repeat_interleave(h, durations.long(), dim=0)


def by_matrix(h, durations):
    """By a matrix of zeros and ones, as voices do it."""
    ends = durations.cumsum(0)
    frames = torch.arange(durations.sum())[:, None]
    return ((frames < ends) & (frames >= ends - durations)).float() @ h


def voice(repeat):
    torch.manual_seed(0)
    layers = {"before": nn.Linear(8, 16), "duration": nn.Linear(16, 1), "after": nn.Linear(16, 8)}
    layers["duration"].weight.data.mul_(3)
    return module(repeated, **layers, repeat=repeat).requires_grad_(False)


def inputs(count, rows=32):
    draw = torch.Generator().manual_seed(1)
    return [2 * torch.randn(rows, 8, generator=draw) for _ in range(count)]


@pytest.mark.parametrize(("repeat", "result"), [(by_repeating, "repeat_interleave"), (by_matrix, "arange")])
def test_layers_that_decide_durations_are_float_and_the_size_is_exact(repeat, result):
    model, data = voice(repeat), inputs(4)
    qmodel = fxq.quantize(model, REFERENCE, data=data, progress=False)
    entries = {e.path: e for e in qmodel.ledger if e.path}
    assert [entries[path].precision for path in ("before", "duration", "after")] == ["float", "float", "int8"]
    assert entries["duration"].kind == "off the grid" and entries["duration"].reason == WHY.format(result)
    assert entries["duration"].decided_by == "annotate"
    for x in inputs(16):
        wanted, actual = model(x), qmodel(x)
        assert actual.shape == wanted.shape and len(wanted) > 32  # 512 durations, whose sums are exact
        assert sqnr(wanted, actual) > 35  # dB: one layer on integers


def test_an_override_quantizes_them_as_the_remedy_says():
    model, data = voice(by_repeating), inputs(4)
    fixes = {e.path: e.fix for e in fxq.quantize(model, REFERENCE, data=data, progress=False).ledger if e.path}
    assert fixes["duration"] == "recipe.override('duration', fxq.QuantConfig())"
    recipe = REFERENCE.override("duration", fxq.QuantConfig())
    entries = fxq.quantize(model, recipe, data=data, progress=False).ledger
    assert {e.path: e.precision for e in entries if e.path} == {"before": "float", "duration": "int8", "after": "int8"}
    (note,) = (e.reason for e in entries if e.path == "duration")
    assert note == f"{WHY.format('repeat_interleave')}; an override selects it all the same"


def test_dynamic_layers_that_decide_durations_are_float():
    entries = fxq.quantize(voice(by_repeating), "dynamic", example_inputs=inputs(1)[0], progress=False).ledger
    precisions = {e.path: e.precision for e in entries if e.path}
    assert precisions["before"] == precisions["duration"] == "float"


def test_sizes_that_come_from_shapes_or_from_inputs_leave_layers_on_integers():
    def forward(self, x, counts):
        h = self.layer(x)
        places = torch.arange(h.size(0))[:, None].float()
        return self.after(torch.repeat_interleave(h + places, counts, dim=0))

    torch.manual_seed(0)
    model = module(forward, layer=nn.Linear(8, 8), after=nn.Linear(8, 8))
    data = [(x, torch.arange(32)) for x in inputs(2)]
    entries = fxq.quantize(model, REFERENCE, data=data, progress=False).ledger
    assert {e.path: e.precision for e in entries if e.path} == {"layer": "int8", "after": "int8"}


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "counts_of",
    [
        lambda h, counts: counts * h.new_ones(h.shape[:1]).long(),
        lambda h, counts: counts * torch.ones_like(h[:, 0]).long(),
        lambda h, counts: counts.to(h).long(),
        lambda h, counts: counts.float().type_as(h).view_as(h[:, 0]).long(),
    ],
    ids=["new_ones", "ones_like", "to", "type_as"],
)
def test_values_that_give_only_shape_and_dtype_decide_nothing(counts_of):
    def forward(self, x, counts):
        h = self.layer(x)
        return self.after(torch.repeat_interleave(h, self.counts_of(h, counts), dim=0))

    torch.manual_seed(0)
    model = module(forward, layer=nn.Linear(8, 8), after=nn.Linear(8, 8), counts_of=counts_of)
    data = [(x, torch.arange(32)) for x in inputs(2)]
    entries = fxq.quantize(model, REFERENCE, data=data, progress=False).ledger
    assert {e.path: e.precision for e in entries if e.path} == {"layer": "int8", "after": "int8"}


def test_a_table_whose_rows_decide_durations_is_float():
    """The lookup itself computes in float, but would round its rows."""

    def spoken(self, letters):
        h = self.letters(letters)
        return self.after(torch.repeat_interleave(h, self.duration(h).exp().ceil().flatten().long(), dim=0))

    torch.manual_seed(0)
    model = module(spoken, letters=nn.Embedding(20, 16), duration=nn.Linear(16, 1), after=nn.Linear(16, 8))
    data = [torch.randint(0, 20, (32,)) for _ in range(4)]
    qmodel = fxq.quantize(model, REFERENCE, data=data, progress=False)
    entries = {e.path: e for e in qmodel.ledger if e.path}
    assert {path: e.precision for path, e in entries.items()} == {
        "letters": "float",
        "duration": "float",
        "after": "int8",
    }
    assert entries["letters"].reason == WHY.format("repeat_interleave")
    alone = fxq.quantize(nn.Sequential(nn.Embedding(20, 16)), REFERENCE, data=data, progress=False)
    assert [e.precision for e in alone.ledger if e.path] == ["weight-only"]  # decides nothing


def test_weights_alone_are_quantized_all_the_same():
    model = voice(by_repeating)
    entries = fxq.quantize(model, "weight_only", example_inputs=inputs(1)[0], progress=False).ledger
    assert [e.precision for e in entries if e.path] == ["weight-only"] * 3


def test_a_range_of_an_onnx_file_has_the_length_that_float_layers_decide():
    text = """<ir_version: 8, opset_import: ["": 13]>
    g (float[n, 4] x, float[4, 1] w, float[4, 4] v) => (float[m, 4] y)
      <float[4, 1] w = {1, 0.5, -0.5, -1}, float[4, 4] v = {1, 0, 0, 1, 0, 1, 0, 0, 0, 0, 1, 0, 1, 1, 1, 1}>
    { d = MatMul(x, w)  e = Exp(d)  c = Ceil(e)  s = ReduceSum<keepdims = 0>(c)
      zero = Constant<value = float {0}>()  one = Constant<value = float {1}>()
      r = Range(zero, s, one)  axes = Constant<value = int64[1] {1}>()  t = Unsqueeze(r, axes)
      o = Constant<value = float[1, 4] {0.01, 0.02, 0.03, 0.04}>()  h = MatMul(t, o)  y = MatMul(h, v) }"""
    model = fxq.read_onnx(onnx.parser.parse_model(text))
    draw = torch.Generator().manual_seed(1)
    data = [torch.randn(32, 4, generator=draw) for _ in range(4)]
    qmodel = fxq.quantize(model, REFERENCE, data=data, progress=False)
    precisions = [(e.op, e.precision) for e in qmodel.ledger if e.op in ("matmul", "linear")]
    assert [precision for _, precision in precisions] == ["float", "int8", "int8"]
    for _ in range(8):
        x = torch.randn(32, 4, generator=draw)
        assert qmodel(x).shape == model(x).shape
