"""split-inputs: where quiet rows of an output depend on an input, it gets 16 bits; all others stay as they are."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import fxq
from fxq.common.data import Batch
from fxq.common.metrics import sqnr
from fxq.graph.info import info, set_info
from fxq.passes import SplitInputs
from tests.support.graphs import expected, text
from tests.support.helpers import PLAIN, managed
from tests.support.machine import needs_x86

LENGTH, LOUD = 2048, 1024


class Voice(nn.Module):
    """A network that makes sound: rows of its output are as quiet as those of its input."""

    def __init__(self, act=None):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Conv1d(2, 4, 3, padding=1), nn.Conv1d(4, 1, 3, padding=1, bias=False)
        self.act = act or nn.ReLU()
        nn.init.zeros_(self.first.bias)

    def forward(self, x):
        return self.last(self.act(self.first(x)))


def sounds(count=4, quiet=0.004, seed=0):
    """Sounds of which the second half is quiet."""
    size = torch.ones(LENGTH)
    size[LOUD:] = quiet
    return list(torch.randn(count, 1, 2, LENGTH, generator=torch.Generator().manual_seed(seed)) * size)


def after(model, until="split-inputs", data=None, recipe=PLAIN):
    data = sounds() if data is None else data
    return fxq.extend.run_passes(model.eval(), recipe, example_inputs=data[0], data=data, until=until)


def is_unchanged(model, data=None, recipe=PLAIN):
    return text(after(model, data=data, recipe=recipe)) == text(after(model, "fallback", data, recipe))


def test_the_graph():
    assert text(after(Voice())) == expected("""
        x = input
        x_q = quantize(x, A)
        x_dq = dequantize(x_q, A)
        x_fine = sub(x, x_dq)
        x_fine_q = quantize(x_fine, B)
        x_fine_dq = dequantize(x_fine_q, B)
        first_weight_dq = int8(first_weight, axis=0)
        first = conv1d(x_dq, first_weight_dq, @first.bias, padding=(1,))
        first_fine = conv1d(x_fine_dq, first_weight_dq, padding=(1,))
        first_sum = add(first, first_fine)
        act = relu(first_sum)
        first_relu_q = quantize(act, C)
        first_relu_dq = dequantize(first_relu_q, C)
        act_fine = sub(act, first_relu_dq)
        act_fine_q = quantize(act_fine, D)
        act_fine_dq = dequantize(act_fine_q, D)
        last_weight_dq = int8(last_weight, axis=0)
        last = conv1d(first_relu_dq, last_weight_dq, padding=(1,))
        last_fine = conv1d(act_fine_dq, last_weight_dq, padding=(1,))
        last_sum = add(last, last_fine)
        return last_sum
    """)


def test_a_second_run_changes_nothing():
    again = PLAIN.insert_pass(type("Again", (SplitInputs,), {"name": "again"})(), after="split-inputs")
    assert text(after(Voice(), "again", recipe=again)) == text(after(Voice()))


def test_the_second_grid_divides_a_step_of_the_first():
    gm = after(Voice())
    coarse, fine = (n for n in gm.graph.nodes if n.name in ("x_q", "x_fine_q"))
    steps = fine.kwargs["scale"] / coarse.kwargs["scale"]
    assert 1 / 255 < steps < 1 / 250 or 1 / 127 < steps < 1 / 123  # with reduce_range
    (x,) = sounds(1)
    c = _rounded(x, coarse)
    left = (x - c - _rounded(x - c, fine))[(x - c).abs() <= coarse.kwargs["scale"] / 2]
    assert left.numel() > 0.9 * x.numel() and float(left.abs().max()) < 0.501 * fine.kwargs["scale"]


def _rounded(x, quantize):
    """Values on the grid of a quantize."""
    options = {"qmin": 0, "qmax": 255, **quantize.kwargs}
    q = (x / options["scale"]).round().add(options["zero_point"]).clamp(options["qmin"], options["qmax"])
    return (q - options["zero_point"]) * options["scale"]


def gains(model, recipe, data=None):
    """dB that the quiet part of an output gains by the pass, on data that calibrated nothing, and what it has then."""
    (x,) = sounds(1, seed=1)
    data = sounds() if data is None else data
    with torch.no_grad():
        want, quiet = model.eval()(x), slice(LOUD + 16, None)
        with_pass, without = (
            sqnr(want[..., quiet], fxq.quantize(model, r, data=data)(x)[..., quiet])
            for r in (recipe, recipe.without_pass("split-inputs"))
        )
    return with_pass - without, with_pass


@pytest.mark.parametrize("act", [nn.ReLU(), nn.LeakyReLU(0.1), nn.Identity()])
def test_quiet_rows_are_as_exact_as_loud_ones(act):
    gain, sqnr_db = gains(Voice(act), PLAIN)
    assert gain > 25 and sqnr_db > 32  # dB


@pytest.mark.any_cpu
@pytest.mark.parametrize("backend", [pytest.param("x86", marks=needs_x86), "jit"])
def test_backends_compute_what_the_graph_says(backend):
    """Integer products are exact, and sums of floats are so but for their last bits."""
    if backend == "jit":
        pytest.importorskip("numba")
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv1d(2, 24, 3, padding=1), nn.LeakyReLU(0.1), nn.ConvTranspose1d(24, 16, 4, stride=2, padding=1),
        nn.Tanh(),
    ).eval()  # fmt: skip
    for layer in model[:3:2]:
        nn.init.zeros_(layer.bias)
    recipe = PLAIN.with_backend(backend).with_optimize("coverage")
    q = fxq.quantize(model, recipe, data=sounds())
    form = after(model, "split-inputs", recipe=recipe)
    (x,) = sounds(1, seed=1)
    assert sum(n.name.endswith("_sum") for n in form.graph.nodes) == 2
    fine_step = 1e-4  # by which a result differs if the last bit of x - c does
    torch.testing.assert_close(q(x), form(x), rtol=0, atol=fine_step)
    q.verify()
    assert all(entry.precision == "int8" for entry in q.ledger if entry.op.startswith("conv"))


class Recognizer(Voice):
    """A network of these layers whose output does not depend on quiet rows."""

    def forward(self, x):
        return super().forward(x).square().unfold(-1, 4, 4).sum((-1, -2))


def test_a_network_whose_output_does_not_depend_on_quiet_rows_stays():
    assert is_unchanged(Recognizer())


@pytest.mark.parametrize("step", [SplitInputs(least=-200.0), SplitInputs(worst=-200.0)])
def test_errors_that_are_allowed(step):
    assert is_unchanged(Voice(), recipe=PLAIN.without_pass("split-inputs").insert_pass(step, after="fallback"))


def test_rows_without_error_do_not_count():
    """Rows of zeros, as padding, are exact."""
    data = sounds(quiet=0.0)
    assert is_unchanged(Voice(), data=data)


def test_short_outputs_count_to_their_end():
    """Of three windows, the last one is quiet."""
    short = [x[..., LOUD - 300 : LOUD + 340] for x in sounds()]
    assert not is_unchanged(Voice(), data=short)
    assert is_unchanged(Voice(), data=[x[..., :300] for x in short])


def test_loud_sounds_stay():
    assert is_unchanged(Voice(), data=sounds(quiet=1.0))


def test_layers_in_float_and_with_dynamic_ranges_stay():
    for override in (fxq.FLOAT, fxq.QuantConfig(activation=None)):
        assert is_unchanged(Voice(), recipe=PLAIN.override("*", override))


@pytest.mark.parametrize("emitting", [("first", "last"), ("first",)])
def test_kernels_that_emit_integers_only_stay(emitting):
    """Also a layer after one of these, whose input is no float value."""
    manager = managed(Voice().eval(), sounds()[0], recipe=PLAIN)
    manager.context.samples.extend(Batch((x,)) for x in sounds())
    gm = after(Voice(), "fallback")
    for node in gm.graph.nodes:
        plan = info(node).plan
        if plan is not None and info(node).path in emitting:
            set_info(node, plan=replace(plan, emits=plan.reads))
    before = text(gm)
    SplitInputs().run(fxq.extend.Rewriter(gm, manager.context, "split-inputs"))
    assert text(gm) == before
    notes = {info(node).path: info(node).note for node in gm.graph.nodes if info(node).note}
    assert notes and all("a kernel of this backend emits integers only" in note for note in notes.values())


def test_an_input_that_a_pad_moves_in_integers_stays():
    class Padded(Voice):
        def forward(self, x):
            return self.last(nn.functional.pad(self.act(self.first(x)), (1, 1), mode="reflect"))

    gm = after(Padded())
    notes = {info(node).path: info(node).note for node in gm.graph.nodes}
    assert "%pad moves integers, which are as coarse" in notes["last"] and "last_fine" not in text(gm)


class Branches(Voice):
    """A function and a sum of an input that is split."""

    def forward(self, x):
        y = torch.nn.functional.leaky_relu(self.first(x), 0.1)
        return self.last(torch.nn.functional.leaky_relu(y, 0.3) + y)


def test_ops_that_compute_an_input_run_in_float():
    """Else they would read and compute integers of one coarse grid."""
    lines = text(after(Branches())).splitlines()
    assert "add = add(leaky_relu_1, leaky_relu)" in lines
    gain, sqnr_db = gains(Branches(), PLAIN)
    assert gain > 25 and sqnr_db > 32  # dB
    ledger = {entry.name: entry for entry in fxq.quantize(Branches().eval(), PLAIN, data=sounds()).ledger}
    assert ledger["add"].precision == "float" and ledger["add"].fix == 'recipe.without_pass("split-inputs")'


def test_the_ledger():
    q = fxq.quantize(Voice().eval(), PLAIN, data=sounds())
    last = next(entry for entry in q.ledger if entry.path == "last")
    assert last.precision == "int8" and last.own_sqnr > 35
    assert last.reason.startswith("its input is the sum of two values of 8 bits: in one, 51 % of its rows would have")
    assert "fxq.FLOAT" in last.fix


@pytest.mark.parametrize("backend", ["reference", "jit"])
def test_files(tmp_path, backend):
    if backend == "jit":
        pytest.importorskip("numba")
    recipe = PLAIN.with_backend(backend).with_optimize("coverage")
    q = fxq.quantize(Voice().eval(), recipe, data=sounds())
    (x,) = sounds(1, seed=1)
    q.save(tmp_path / "m.fxq")
    assert torch.equal(fxq.load(tmp_path / "m.fxq")(x), q(x))


def test_exported_onnx(tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    model, (x,) = Voice().eval(), sounds(1, seed=1)
    path = fxq.quantize(model, PLAIN, data=sounds()).export(tmp_path / "m.onnx")
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (got,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    assert sqnr(model(x)[..., LOUD + 16 :], torch.tensor(got)[..., LOUD + 16 :]) > 32
