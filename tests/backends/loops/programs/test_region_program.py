"""Programs as a whole: any layout and size of inputs, threads, memory, and networks that are one region."""

import threading

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fxq
from fxq.backends.loops.programs.layer_steps import LinearStep, ProductStep
from fxq.backends.loops.programs.region_program import RegionProgram
from fxq.common.metrics import sqnr
from tests.support.models import settled
from tests.support.programs import LAST, LOOPS, Draft, compare, kinds, program, quantized, regions, steps_of, whole

pytestmark = pytest.mark.any_cpu

# ---- inputs and outputs


def small(draft, x):
    """A few layers, with borders, a residual and a mean: two results."""
    x = draft.qdq(draft.op("relu", draft.conv(draft.qdq(x, (0.03, 120)), 16, 3)), (0.02, 0))
    y = draft.conv(draft.qdq(draft.conv(x, 16, 3, groups=16), (0.03, 120)), 16)
    y = draft.qdq(draft.op("add", y, x), (0.04, 100))
    return draft.conv(y, 5, 3, stride=(2, 2)), draft.op("mean", y, dim=(2, 3))


def near(got, wanted):
    """Most floats are the same; others differ where an integer inside was rounded to the other side."""
    assert [t.shape for t in got] == [t.shape for t in wanted]
    assert sqnr(list(wanted), list(got)) > 45


LAYOUTS = {
    "contiguous": lambda x: x.contiguous(),
    "channels last": lambda x: x.contiguous(memory_format=LAST),
    "with gaps": lambda x: torch.stack([x, x + 1], -1)[..., 0],
    "with gaps, channels last": lambda x: torch.cat([x, x], 1).contiguous(memory_format=LAST)[:, : x.shape[1]],
    "turned": lambda x: x.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
    "expanded": lambda x: x[:1, :, :1].expand(x.shape),
    "watched": lambda x: x.clone().requires_grad_(),
    "negated": lambda x: torch._neg_view(-x),
}


@pytest.mark.one_in(6)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("batch", [1, 2, 5])
@pytest.mark.parametrize("channels", [1, 3, 16])
@pytest.mark.parametrize("last", [False, True])
def test_inputs_in_any_layout(layout, batch, channels, last):
    """Also in another one than the program was made for."""
    draft = Draft()
    form = draft.form(*small(draft, draft.input(draft.normal(batch, channels, 8, 7))))
    x = LAYOUTS[layout](draft.inputs[0])
    got = RegionProgram(LOOPS, form, [x], [last])(x)
    near(got, form(x.detach().contiguous()))
    assert got[0].is_contiguous(memory_format=LAST if last else torch.contiguous_format)
    assert not any(t.requires_grad for t in got)


@pytest.mark.parametrize("shape", [(2, 1, 6, 5), (2, 3, 1, 1), (1, 1, 1, 1), (1, 3, 1, 5), (5, 1, 1, 1)])
def test_shapes_of_which_the_layout_cannot_be_told(shape):
    draft = Draft()
    x = draft.input(draft.normal(*shape))
    outputs = draft.op("relu", x), draft.quantize(x), draft.conv(draft.qdq(x), 3, 3)
    form = draft.form(*outputs)
    for t in (draft.inputs[0], draft.inputs[0].contiguous(memory_format=LAST)):
        for last in (False, True):
            compare(RegionProgram(LOOPS, form, [t], [last])(t), form(t))


def test_results_are_the_callers():
    draft = Draft()
    compiled = program(draft.form(*small(draft, draft.input(draft.normal(2, 3, 8, 7)))), draft.inputs)
    first = compiled(*draft.inputs)
    kept = [t.clone() for t in first]
    compiled(torch.randn(2, 3, 8, 7))
    assert all(map(torch.equal, first, kept))


def test_one_result_is_no_tuple():
    draft = Draft()
    x = draft.input(draft.normal(2, 3))
    assert isinstance(program(draft.form(draft.op("relu", x)), draft.inputs)(*draft.inputs), torch.Tensor)
    assert isinstance(program(draft.form(draft.op("relu", x), x), draft.inputs)(*draft.inputs), tuple)


def test_inference_mode():
    draft = Draft()
    form = draft.form(*small(draft, draft.input(draft.normal(2, 3, 8, 7))))
    compiled = program(form, draft.inputs)
    with torch.inference_mode():
        first = compiled(*draft.inputs)
    assert all(map(torch.equal, first, compiled(*draft.inputs)))


def test_constants_of_the_model_may_go():
    """The program owns or keeps all memory that it reads."""
    draft = Draft()
    form = draft.form(*small(draft, draft.input(draft.normal(2, 3, 8, 7))))
    inputs, wanted = draft.inputs, form(*draft.inputs)
    compiled = program(form, inputs)
    del draft, form
    filler = [torch.full((n,), 1e9) for n in range(1, 3000)]
    near(compiled(*inputs), wanted)
    assert filler


# ---- regions of any ops

GRID = 0.03, 110
OPS = ["conv", "conv and add", "depthwise", "cat", "add", "gate", "norm", "layer norm", "max_pool2d", "avg_pool2d"]
PLACES = st.integers(0, 11)


def grown(draft, values, op, left, right):
    """Result of an op on one or two earlier values, quantized to the grid that all values have."""
    x, y = draft.dequantize(values[left % len(values)], GRID), draft.dequantize(values[right % len(values)], GRID)
    channels = draft.values[x].shape[1]
    window = {"kernel_size": (3, 3), "stride": (1, 1), "padding": (1, 1)}
    if op == "cat":
        return draft.op("cat", [x.args[0], y.args[0]], dim=1) if channels < 100 else values[-1]
    if op == "max_pool2d":
        return draft.op(op, x.args[0], **window)
    if op == "avg_pool2d":
        value = draft.op(op, x, **window)
    elif op == "depthwise":
        value = draft.conv(x, channels, 5, groups=channels)
    elif op == "conv and add":
        value = draft.op("relu", draft.op("add", draft.conv(x, draft.values[y].shape[1], 3), y))
    elif op == "gate":
        value = draft.op("mul", x, draft.op("sigmoid", draft.op("mean", x, dim=(2, 3), keepdim=True)))
    elif op == "add" and draft.values[y].shape == draft.values[x].shape:
        value = draft.op(op, x, y)
    elif op == "norm":
        value = draft.op("batch_norm", x, draft.vector(channels), draft.constant(torch.linspace(0.5, 1.5, channels)))
    elif op == "layer norm":
        value = draft.op("layer_norm", draft.op("permute", x, dims=(0, 2, 3, 1)), normalized_shape=(channels,))
        return draft.op("permute", draft.quantize(draft.op("silu", value), GRID), dims=(0, 3, 1, 2))
    else:
        value = draft.op("hardswish", draft.conv(x, 16 + left % 3 * 7, 1 + right % 2 * 2))
    return draft.quantize(value, GRID)


@settings(max_examples=11, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(OPS), PLACES, PLACES), min_size=1, max_size=8), PLACES, PLACES)
def test_regions_of_any_ops(ops, first, second):
    draft = Draft(len(ops))
    values = [draft.quantize(draft.conv(draft.image(2, 3, 5, 4), 16, 3), GRID)]
    for op, left, right in ops:
        values.append(grown(draft, values, op, left, right))
    last = draft.op("relu", draft.dequantize(values[second % len(values)], GRID))
    form = draft.form(values[-1], values[first % len(values)], last)
    compiled = program(form, draft.inputs)
    assert overlaps(compiled) == []
    for got, wanted, step in zip(compiled(*draft.inputs), form(*draft.inputs), (1, 1, GRID[0]), strict=True):
        difference = (got.float() - wanted.float()).abs() / step
        # Up to eight ops round one after the other: some integers differ, and change what is computed of them.
        assert difference.max() < 2.5 and difference.mean() < 0.1


# ---- threads


def test_threads_call_at_once():
    draft = Draft()
    form = draft.form(*small(draft, draft.input(draft.normal(2, 3, 8, 7))))
    compiled = program(form, draft.inputs)
    inputs = [torch.randn(2, 3, 8, 7) for _ in range(8)]
    wanted = [compiled(x) for x in inputs]
    for x, y in zip(inputs, wanted, strict=True):
        near(y, form(x))
    wrong, begin = [], threading.Barrier(8)

    def call(k):
        begin.wait()
        for i in range(300):
            x, y = inputs[(k + i) % 8], wanted[(k + i) % 8]
            if not all(map(torch.equal, compiled(x), y)):
                wrong.append((k, i))

    threads = [threading.Thread(target=call, args=(k,)) for k in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


# ---- memory


def overlaps(compiled):
    """Pairs of areas that are in use at once and share bytes, counted step by step."""
    areas, result = {}, []
    for i, step in enumerate(compiled.plan.steps):
        for area in (step.out, *step.reads):
            if area.root.base == 1:
                areas.setdefault(area.root, []).append(i)
    for left, its in areas.items():
        for right, others in areas.items():
            apart = left.offset + left.nbytes <= right.offset or right.offset + right.nbytes <= left.offset
            if left is not right and min(its) <= max(others) and min(others) <= max(its) and not apart:
                result.append((left, right))
    return result


@pytest.mark.parametrize("seed", range(3))
def test_values_in_use_at_once_share_no_memory(seed):
    draft = Draft(seed)
    x = draft.input(draft.normal(2, 3, 9, 8))
    kept = [draft.qdq(x, (0.03, 120))]
    for i in range(12):
        y = kept[-1 - (i * (seed + 1)) % min(len(kept), 3)]
        y = draft.conv(y, 16, (1, 3, 5)[i % 3])
        if i % 4 == 3 and draft.values[kept[-1]].shape == draft.values[y].shape:
            y = draft.op("add", y, kept[-1])
        kept.append(draft.qdq(draft.op("relu", y)))
    compiled = program(draft.form(*map(draft.quantize, kept[-2:])), draft.inputs)
    assert overlaps(compiled) == []
    areas = {step.out.root for step in compiled.plan.steps if step.out.root.base == 1}
    assert compiled._arena.nbytes < sum(area.nbytes for area in areas)


def test_borders_stay_over_calls():
    """Each call leaves borders as they were, though other values have been there in between."""
    draft = Draft()
    x = draft.qdq(draft.input(draft.normal(1, 16, 6, 5)), (0.03, 120))
    for i in range(6):
        x = draft.qdq(draft.conv(x, 16, (3, 5)[i % 2]), (0.05, 120 - 10 * (i % 3)))
    form = draft.form(draft.quantize(draft.op("relu", x)))
    compiled = program(form, draft.inputs)
    for i in range(4):
        images = torch.randn(1, 16, 6, 5) * 3**i
        compare(compiled(images), form(images), share=0.1)  # six layers, each of which rounds


# ---- what takes how long


def test_times_of_steps():
    draft = Draft()
    compiled = program(draft.form(*small(draft, draft.input(draft.normal(2, 3, 8, 7)))), draft.inputs)
    timed = compiled.timed(draft.inputs, range(3))
    assert [step for step, _ in timed] == compiled.plan.steps
    assert all(0 <= us < 1e6 for _, us in timed) and sum(us for _, us in timed) > 0


# ---- networks


class Mobile(nn.Module):
    """Inverted residuals with squeeze and excite, and hardswish."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.Hardswish())
        self.expand = nn.Sequential(nn.Conv2d(16, 72, 1, bias=False), nn.BatchNorm2d(72), nn.Hardswish())
        self.depth = nn.Sequential(nn.Conv2d(72, 72, 5, 1, 2, groups=72, bias=False), nn.BatchNorm2d(72), nn.ReLU6())
        self.narrow, self.wide = nn.Conv2d(72, 24, 1), nn.Conv2d(24, 72, 1)
        self.project = nn.Sequential(nn.Conv2d(72, 16, 1, bias=False), nn.BatchNorm2d(16))
        self.head = nn.Sequential(nn.Linear(16, 40), nn.Hardswish(), nn.Linear(40, 10))

    def forward(self, x):
        x = self.stem(x)
        y = self.depth(self.expand(x))
        gate = F.hardsigmoid(self.wide(F.relu(self.narrow(F.adaptive_avg_pool2d(y, 1)))))
        x = x + self.project(y * gate)
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


class Block(nn.Module):
    def __init__(self, columns, wide, stride):
        super().__init__()
        self.a, self.b = nn.Conv2d(columns, wide, 3, stride, 1), nn.Conv2d(wide, wide, 3, 1, 1)
        self.norms = nn.ModuleList([nn.BatchNorm2d(wide), nn.BatchNorm2d(wide)])
        self.down = nn.Conv2d(columns, wide, 1, stride) if stride > 1 else nn.Identity()

    def forward(self, x):
        y = F.relu(self.norms[0](self.a(x)))
        return F.relu(self.norms[1](self.b(y)) + self.down(x))


class ConvNext(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.depth = nn.Conv2d(3, 32, 4, 4), nn.Conv2d(32, 32, 7, padding=3, groups=32)
        self.norm, self.a, self.b = nn.LayerNorm(32), nn.Linear(32, 128), nn.Linear(128, 32)
        self.scale, self.head = nn.Parameter(0.5 + torch.rand(32)), nn.Linear(32, 10)

    def forward(self, x):
        x = self.stem(x)
        y = self.norm(self.depth(x).permute(0, 2, 3, 1))
        y = self.scale * self.b(F.gelu(self.a(y)))
        return self.head((x + y.permute(0, 3, 1, 2)).mean((-2, -1)))


class Unet(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(1, 16, 3, padding=1), nn.Conv2d(16, 32, 3, padding=1)
        self.up, self.c = nn.ConvTranspose2d(32, 16, 2, 2), nn.Conv2d(32, 16, 3, padding=1)
        self.out = nn.ConvTranspose2d(16, 1, 9, 2, 4, 1)

    def forward(self, x):
        a = F.relu(self.a(x))
        b = F.relu(self.b(F.max_pool2d(a, 2)))
        return self.out(F.relu(self.c(torch.cat([self.up(b), a], 1))))


class Dense(nn.Module):
    """Batch norms that are read by nothing that they could be folded into."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 3, padding=1)
        self.norms = nn.ModuleList([nn.BatchNorm2d(32 + 16 * k) for k in range(3)])
        self.convs = nn.ModuleList([nn.Conv2d(32 + 16 * k, 16, 3, padding=1) for k in range(3)])
        self.head = nn.Linear(80 * 4, 10)

    def forward(self, x):
        x = self.stem(x)
        for norm, conv in zip(self.norms, self.convs, strict=True):
            x = torch.cat([x, conv(F.relu(norm(x)))], 1)
        return self.head(F.avg_pool2d(x, 4).flatten(1))


class TwoHeads(nn.Module):
    """An output that is read inside, too, and one of another rank."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 16, 3, padding="same"), nn.Conv2d(16, 16, (5, 3), padding="same")
        self.slope, self.head = nn.PReLU(16), nn.Linear(16, 10)

    def forward(self, x):
        features = self.slope(self.a(x))
        return features, self.head(F.relu(self.b(features)).mean((2, 3)))


NETWORKS = {
    "mobile": (Mobile, 3),
    "residual": (lambda: nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), Block(16, 16, 1), Block(16, 40, 2)), 3),
    "convnext": (ConvNext, 3),
    "unet": (Unet, 1),
    "dense": (Dense, 3),
    "two_heads": (TwoHeads, 3),
    "leaky": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 17, 3, padding=2, dilation=2), nn.LeakyReLU(0.1),
            nn.AvgPool2d(3, 1, 1, count_include_pad=False),
            nn.Conv2d(17, 33, 3, 2, 1), nn.SiLU(), nn.MaxPool2d(2), nn.Conv2d(33, 5, 1), nn.Sigmoid(),
        ),
        3,
    ),
    "sequence": (lambda: nn.Sequential(nn.Linear(8, 40), nn.GELU(), nn.LayerNorm(40), nn.Linear(40, 8)), None),
}  # fmt: skip


@pytest.mark.one_in(8)
@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_is_one_region(name):
    make, channels = NETWORKS[name]
    model = settled(make)

    def sample(batch, size=8):
        return torch.randn(batch, size, 8) if channels is None else torch.randn(batch, channels, size, size)

    x = sample(2)
    q, form = whole(model, x)
    for images in (x, sample(1), sample(5)):
        wanted, got = form(images), q(images)
        assert sqnr(wanted, got) > 40  # integers inside that were rounded to the other side, and all after them
        assert sqnr(wanted, program(form, [images])(images)) > 40
    assert sqnr(model(x), q(x)) > 20  # of 8 bits
    if channels is not None:
        last = q(x.contiguous(memory_format=LAST))
        assert sqnr(q(x), last) > 100


def test_residuals_are_added_by_layers():
    model, x = settled(NETWORKS["residual"][0]), torch.randn(2, 3, 8, 8)
    _, form = whole(model, x)
    compiled = program(form, [x])
    residuals = [step.residual is not None for step in steps_of(compiled, ProductStep)]
    assert residuals.count(True) >= 1


@pytest.mark.slow
def test_a_network_whose_gate_is_in_float():
    """A layer that reads a mean is float, and the program computes it, too."""
    model, x = settled(Mobile), torch.randn(2, 3, 16, 16)
    recipe = fxq.Recipe.static(backend="jit").with_min_sqnr(None).override("narrow", fxq.FLOAT)
    q = fxq.quantize(model, recipe.override("wide", fxq.FLOAT), data=[x], example_inputs=x, progress=False)
    assert sqnr(model(x), q(x)) > 20
    for kernel in regions(q):
        form = kernel.form.module(kernel)
        assert form is not None


def test_what_no_step_computes_stays_outside():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 16, 3), nn.Conv2d(16, 16, 3, groups=4)

        def forward(self, x):
            return self.b(torch.exp(-self.a(x).abs()))

    model, x = settled(Odd), torch.randn(2, 3, 9, 9)
    q = quantized(model, x)
    assert len(regions(q)) <= 1 and sqnr(model(x), q(x)) > 15


def test_steps_of_a_network():
    model, x = settled(ConvNext), torch.randn(2, 3, 16, 16)
    _, form = whole(model, x)
    assert "MoveStep" not in kinds(program(form, [x])) and steps_of(program(form, [x]), LinearStep) == []
