"""gptq: against the algorithm written out plainly, and what it is worth."""

import weakref
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import fxq
from fxq.common.metrics import sqnr, tensors
from fxq.errors import InputError, RecipeError
from fxq.paired.output_error import InputProducts, OutputError, WeightRows
from fxq.passes import Gptq
from fxq.pipeline.float_values import FloatValues
from tests.paired.test_used_rows import Pooled, padded
from tests.support.graphs import expected, program, run_pass

FOUR_BITS = fxq.Recipe.weight_only(bits=4, per=16, backend="reference")


def correlated(count, inputs, seed=0):
    """Samples whose values have a few causes in common, as what layers read."""
    g = torch.Generator().manual_seed(seed)
    causes = torch.randn(inputs // 4, inputs, generator=torch.Generator().manual_seed(99))
    return torch.randn(count, inputs // 4, generator=g) @ causes + 0.3 * torch.randn(count, inputs, generator=g)


def plainly(weight, scale, zero_point, qmin, qmax, gram, cross, damping, order):
    """One column at a time, with the inverse made anew for those that are left; float64."""
    gram, cross = gram.double(), cross.double()
    damped = gram + damping * gram.diagonal().mean() * torch.eye(len(gram), dtype=torch.float64)
    left = weight.double() + (cross.T - weight.double() @ gram) @ damped.inverse()
    integers = torch.zeros_like(left)
    todo = list(order)
    while todo:
        inverse = damped[todo][:, todo].inverse()
        i = todo[0]
        integers[:, i] = (torch.round(left[:, i] / scale[:, i]) + zero_point[:, i]).clamp(qmin, qmax)
        error = (left[:, i] - (integers[:, i] - zero_point[:, i]) * scale[:, i]) / inverse[0, 0]
        left[:, todo] -= error[:, None] * inverse[0]
        todo = todo[1:]
    return integers.float()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("inputs", [16, 200])  # less and more than a group of columns
@pytest.mark.parametrize("ordered", [False, True])
def test_it_is_the_algorithm(inputs, ordered):
    torch.manual_seed(0)
    weight, real = torch.randn(6, inputs), correlated(1000, inputs)
    x = (real * 4).round() / 4
    error = error_of(x, real, weight)
    scale, zero_point = 0.3 + 0.1 * torch.rand(6, inputs), torch.randint(-2, 3, (6, inputs)).float()
    grid = WeightRows(weight[None], scale[None], zero_point[None], -8, 7)
    same_grid, (chosen,) = Gptq(ordered=ordered).choose(grid, error)
    assert torch.equal(same_grid.scale, scale[None])  # it has no blocks
    gram, cross = error.gram[0], error.cross[0]
    order = gram.diagonal().argsort(descending=True).tolist() if ordered else range(inputs)
    wanted = plainly(weight, scale, zero_point, -8, 7, gram, cross, 0.01, order)
    assert (chosen != wanted).float().mean() < 0.01  # ties, and what follows from them
    nearest = (grid.steps().round()).clamp(-8, 7)
    assert error(grid.real(chosen[None])).sum() < 0.5 * error(grid.real(nearest)).sum()


LAYER = """
    x: float32[64, 8] = input()
    w: float32[3, 8] = tensor('w')
    w_int4: uint8[3, 4] = tensor('w_int4')
    scale: float32[3, 2] = tensor('scale')
    zero: uint8[3, 2] = tensor('zero')
    w_dq: float32[3, 8] = dequantize(w_int4, scale=scale, zero_point=zero, qmin=0, qmax=15, axis=1, block=4, \
packed=(8,))  # stands_for='w'
    y = linear(x, w_dq)  # 'fc'
    return y
"""


def test_text_before_and_after():
    """The grids of blocks follow; how integers are kept stays."""
    torch.manual_seed(0)
    tensors = {
        "w": torch.randn(3, 8),
        "w_int4": torch.randint(0, 256, (3, 4), dtype=torch.uint8),
        "scale": torch.full((3, 2), 0.4),
        "zero": torch.full((3, 2), 8, dtype=torch.uint8),
    }
    gm = run_pass(Gptq(), LAYER, tensors, data=(correlated(64, 8),))
    assert program(gm) == expected("""
        x: float32[64, 8] = input()
        w: float32[3, 8] = tensor('w')
        zero: uint8[3, 2] = tensor('zero')
        w_int4_chosen: uint8[3, 4] = tensor('fxq_data.w_int4_chosen')
        w_int4_scale_chosen: float16[3, 2] = tensor('fxq_data.w_int4_scale_chosen')
        w_dq: float32[3, 8] = dequantize(w_int4_chosen, scale=w_int4_scale_chosen, zero_point=zero, \
qmin=0, qmax=15, axis=1, \
block=4, packed=(8,))
        y: float32[64, 3] = linear(x, w_dq)
        return y
    """)
    x = correlated(64, 8)
    assert sqnr(x @ tensors["w"].T, gm(x)) > 15  # dB; the integers before were random


@pytest.mark.one_in(4)
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_layers_come_closer_on_other_samples_too(bits):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 24, bias=False)).eval()
    recipe = fxq.Recipe.weight_only(bits=bits, per=16, backend="reference")
    data = [correlated(64, 64, seed) for seed in range(8)]
    with_pass = recipe.insert_pass(Gptq(samples=512), after="insert-qdq")
    plain, better = (fxq.quantize(model, r, data=data) for r in (recipe.without_pass("gptq"), with_pass))
    x = correlated(256, 64, 50)
    with torch.no_grad():
        wanted = model(x)
        assert sqnr(wanted, better(x)) > sqnr(wanted, plain(x)) + 2  # dB
    assert [edit.rule for edit in better.history["gptq"].edits] == ["gptq", "gptq"]


def test_convolutions_and_inputs_that_are_always_zero():
    """Groups have a Hessian each, with zeros in it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(8, 6, 3, groups=2), nn.ConvTranspose2d(6, 4, 2, groups=2)).eval()
    mixed = torch.randn(2, 8)
    data = [torch.einsum("nchw,cd->ndhw", torch.randn(16, 2, 6, 6), mixed) for _ in range(4)]
    for x in data:
        x[:, 2] = 0
    recipe = fxq.Recipe.weight_only(bits=4, per=9, backend="reference")
    plain, better = (
        fxq.quantize(model, r, data=data)
        for r in (recipe.without_pass("gptq"), recipe.insert_pass(Gptq(), after="insert-qdq"))
    )
    with torch.no_grad():
        wanted = model(data[0])
        assert sqnr(wanted, better(data[0])) > sqnr(wanted, plain(data[0])) + 1  # dB


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(40, 32), nn.Linear(32, 40, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens, x):
        return self.table(tokens), self.head(x)


def test_layers_with_inputs_that_overflow_keep_their_integers():
    model = nn.Sequential(nn.Linear(32, 16), nn.Linear(16, 8)).eval()
    data = [1e20 * correlated(16, 32)]
    plain, qmodel = (fxq.quantize(model, r, data=data) for r in (FOUR_BITS.without_pass("gptq"), FOUR_BITS))
    assert not qmodel.history["gptq"].edits and torch.equal(plain(data[0]), qmodel(data[0]))
    assert {row.reason for row in qmodel.ledger} == {
        "gptq leaves its integers: its inputs are too large, or not finite"
    }


def test_the_table_of_a_tied_head_gets_its_integers():
    torch.manual_seed(0)
    model, config = Tied().eval(), FOUR_BITS.config
    recipe = FOUR_BITS.override(nn.Embedding, config).override("head", config)
    data = [(torch.arange(40), correlated(40, 32, seed)) for seed in range(8)]
    plain, better = (fxq.quantize(model, r, data=data) for r in (recipe.without_pass("gptq"), recipe))
    table, columns = better(torch.arange(40), torch.eye(40, 32))
    torch.testing.assert_close(columns[:32].T, table, rtol=1e-5, atol=1e-6)
    x = correlated(40, 32, 50)
    with torch.no_grad():
        wanted, before, after = (m(torch.arange(40), x)[1] for m in (model, plain, better))
    assert sqnr(wanted, after) > sqnr(wanted, before) + 2  # dB


def test_without_data():
    recipe = FOUR_BITS.insert_pass(Gptq(), after="insert-qdq")
    with pytest.raises(InputError, match=r"gptq needs the inputs of layers, and no samples are recorded\. Pass data"):
        fxq.quantize(nn.Sequential(nn.Linear(32, 4)).eval(), recipe, example_inputs=torch.rand(2, 32))


def test_a_recipe_that_is_saved_has_it(tmp_path):
    recipe = FOUR_BITS.insert_pass(Gptq(damping=0.1, ordered=False, samples=16), after="insert-qdq")
    recipe.save(tmp_path / "r.toml")
    assert fxq.Recipe.load(tmp_path / "r.toml") == recipe


class Recurrent(nn.Module):
    def __init__(self, kind, **options):
        super().__init__()
        self.layer = getattr(nn, kind)(24, 32, **options)

    def forward(self, x, *states):
        return self.layer(x, *states)[0]


@pytest.mark.one_in(6)
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_recurrent_layers(kind, bidirectional):
    """Their two weights, each by what it is multiplied with."""
    torch.manual_seed(0)
    model = Recurrent(kind, bidirectional=bidirectional).eval()
    recipe = fxq.Recipe.weight_only(bits=3, per=8, backend="reference")
    data = [correlated(4 * 30, 24, seed).view(30, 4, 24) for seed in range(8)]
    plain, better = (
        fxq.quantize(model, r, data=data)
        for r in (recipe.without_pass("gptq"), recipe.insert_pass(Gptq(), after="insert-qdq"))
    )
    x = correlated(4 * 30, 24, 50).view(30, 4, 24)
    with torch.no_grad():
        wanted = model(x)
        assert sqnr(wanted, better(x)) > sqnr(wanted, plain(x)) + 1.5  # dB
    assert len(better.history["gptq"].edits) == 2 + 2 * bidirectional


class Summed(nn.Module):
    """A recurrent layer, another, and the sum of the tokens that a mask keeps: (N, L, 16), (N, L) bool to (N, 8)."""

    def __init__(self, kind):
        super().__init__()
        self.layer, self.out = getattr(nn, kind)(16, 16, batch_first=True), nn.Linear(16, 8)

    def forward(self, x, keep):
        return (self.out(self.layer(x)[0]) * keep[..., None]).sum(1)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("build", "layers"), [(Pooled, 4), (partial(Summed, "LSTM"), 3), (partial(Summed, "GRU"), 3)])
def test_padding_does_not_count(build, layers):
    """Whatever stands in it, the integers are the same."""
    recipe = FOUR_BITS.insert_pass(Gptq(), after="insert-qdq")
    torch.manual_seed(0)
    model = build().eval()
    a, b = (fxq.quantize(model, recipe, data=[padded(size=size)]).state_dict() for size in (1.0, 30.0))
    integers = [name for name in a if name.endswith("int4_chosen")]
    assert len(integers) == layers and all(torch.equal(a[name], b[name]) for name in integers)


def test_a_token_that_is_far_larger_counts_like_the_others():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 24)).eval()
    x = correlated(8 * 40, 32).view(8, 40, 32)
    large = x.clone()
    large[:, 0] *= 300
    recipe = fxq.Recipe.weight_only(bits=3, per=8, backend="reference").insert_pass(Gptq(), after="insert-qdq")
    alike, with_large = (fxq.quantize(model, recipe, data=[data]) for data in (x, large))
    with torch.no_grad():
        wanted = model(x)
        assert sqnr(wanted, with_large(x)) > sqnr(wanted, alike(x)) - 1  # dB


def test_what_is_chosen_holds_no_more_memory_than_it_needs():
    recipe = fxq.Recipe.weight_only(backend="reference").insert_pass(Gptq(), after="insert-qdq")
    qmodel = fxq.quantize(nn.Sequential(nn.Linear(64, 32)).eval(), recipe, data=[correlated(64, 64)])
    assert qmodel.history["gptq"].edits
    for kept in qmodel.state_dict().values():
        assert kept.untyped_storage().nbytes() == kept.numel() * kept.element_size()


def test_what_rounding_costs_tokens_does_not_change_the_weight_of_a_linear_layer():
    """Fitted to tokens of 2 bits, the weight would be a smaller one, which suits none but them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 24)).eval()
    coarse = fxq.Recipe.static(activation=fxq.TensorSpec(bits=2), backend="reference", optimize="coverage")
    recipe = coarse.with_min_sqnr(None).without_pass("correct-bias").insert_pass(Gptq(scales=False), after="smooth")
    qmodel = fxq.quantize(model, recipe, data=[torch.randn(8, 40, 32) for _ in range(4)])
    layer = qmodel.qparams()["0"]
    weight = layer.weight.float() * layer.weight_scale[:, None]
    assert sqnr(model[0].weight.detach(), weight) > 30  # dB


class Projections(nn.Module):
    """Layers that read one value, and between them another that reads another: (N, 32) to (N, 8) twice and (N, 4)."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.out = nn.Linear(32, 8), nn.Linear(32, 8), nn.Linear(8, 4)

    def forward(self, x):
        q = self.q(x)
        return q, self.out(q), self.k(x)


def test_layers_that_read_one_value_get_the_integers_of_each_alone():
    torch.manual_seed(0)
    model, data = Projections().eval(), [correlated(64, 32, seed) for seed in range(4)]
    together = fxq.quantize(model, FOUR_BITS, data=data)
    _, out, k = together(data[0])
    for got, layers in ((out, [model.q, model.out]), (k, [model.k])):
        alone = fxq.quantize(nn.Sequential(*layers), FOUR_BITS, data=data)
        torch.testing.assert_close(got, alone(data[0]), rtol=0, atol=1e-6)


def test_the_preset_has_it_for_four_bits_with_data():
    torch.manual_seed(0)
    model, data = nn.Sequential(nn.Linear(64, 48)).eval(), [correlated(64, 64, seed) for seed in range(8)]
    chosen = fxq.quantize(model, FOUR_BITS, data=data)
    assert [edit.rule for edit in chosen.history["gptq"].edits] == ["gptq"]
    without_data = fxq.quantize(model, FOUR_BITS, example_inputs=data[0])
    eight_bits = fxq.quantize(model, fxq.Recipe.weight_only(backend="reference"), data=data)
    assert not without_data.history["gptq"].edits and not eight_bits.history["gptq"].edits


def test_an_inserted_one_replaces_that_of_the_preset():
    names = [step.name for step in FOUR_BITS.pipeline]
    moved = FOUR_BITS.insert_pass(Gptq(damping=0.1), after="insert-qdq").pipeline
    assert moved["gptq"].damping == 0.1 and sorted(names) == sorted(step.name for step in moved)
    assert moved.position("gptq") == moved.position("insert-qdq") + 1
    same_place = FOUR_BITS.insert_pass(Gptq(damping=0.1), after="smooth").pipeline
    assert [step.name for step in same_place] == names
    with pytest.raises(RecipeError, match="has a pass called 'gptq' already: remove it first"):
        FOUR_BITS.insert_pass(Gptq(), after="smooth").insert_pass(Gptq(), after="smooth")


def test_cached_float_outputs_of_layers_change_nothing(monkeypatch):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 24)).eval()
    data, x = [correlated(64, 64, seed) for seed in range(4)], correlated(256, 64, 50)
    cached = fxq.quantize(model, FOUR_BITS, data=data)
    monkeypatch.setattr(FloatValues, "filled_by", lambda self, gm, context: nullcontext())
    assert torch.equal(cached(x), fxq.quantize(model, FOUR_BITS, data=data)(x))


def test_data_that_the_model_does_not_run_on_is_named():
    """The first sample of the batch is right."""
    model = nn.Sequential(nn.Embedding(8, 32), nn.Linear(32, 32)).eval()
    batch = torch.tensor([[1, 2], [3, 8]])
    with pytest.raises(InputError, match=r"the model does not run on .*index out of range"):
        fxq.quantize(
            model, FOUR_BITS, data=[{"input": batch}], example_inputs={"one": (batch[:1],), "row": (batch[0],)}
        )


def error_of(x, real, weight):
    inputs = InputProducts()
    inputs.add(x[None], real[None])
    return OutputError(inputs, weight[None])


@pytest.mark.parametrize("symmetric", [False, True])
def test_scales_of_blocks_follow_the_order(symmetric):
    """One scale per block, zero points in the middle if they were, and far less error than with rounding to nearest."""
    torch.manual_seed(0)
    weight, x = torch.randn(24, 64), correlated(1000, 64)
    low, high = (-7, 7) if symmetric else (0, 15)
    ends = weight.view(24, 4, 16)
    scale = (ends.abs().amax(2) / 7 if symmetric else (ends.amax(2) - ends.amin(2)) / 15).repeat_interleave(16, 1)
    zero = torch.zeros(24, 64) if symmetric else (-ends.amin(2) / scale[:, ::16]).round().repeat_interleave(16, 1)
    grid = WeightRows(weight[None], scale[None], zero[None], low, high, block=16)
    error = error_of(x, x, weight)
    new_grid, chosen = Gptq().choose(grid, error)
    old_grid, _ = Gptq(scales=False).choose(grid, error)
    assert torch.equal(old_grid.scale, grid.scale)
    for values in (new_grid.scale, new_grid.zero_point):
        blocks = values.view(24, 4, 16)
        assert torch.equal(blocks, blocks[:, :, :1].expand_as(blocks))
    assert not torch.equal(new_grid.scale, grid.scale)
    assert new_grid.is_symmetric == symmetric
    assert chosen.min() >= low and chosen.max() <= high
    assert error(new_grid.real(chosen)).sum() < 0.2 * error(grid.real(grid.nearest())).sum()


def test_trust_is_tried_on_patches_that_were_held_out():
    """With many patches of one kind, the fit follows them; where the others are unrelated, it trusts the weight."""
    torch.manual_seed(0)
    weight = torch.randn(32, 64)
    grid = WeightRows(weight[None], torch.full((1, 32, 64), 0.4), torch.zeros(1, 32, 64), -7, 7)
    x = correlated(4000, 64)
    fit, alike = (error_of(part + 0.3 * torch.randn_like(part), part, weight) for part in (x[:3000], x[3000:]))
    few, apart = error_of(x[:40], 1.5 * x[:40], weight), error_of(x[3000:], x[3000:], weight)
    tried = Gptq(trust=4.0, trials=True)
    assert tried.trust_in(grid, fit, alike) < 4.0 < tried.trust_in(grid, few, apart)
    assert Gptq().trust_in(grid, few, apart) == Gptq().trust


def test_samples_are_recorded_only_if_a_weight_needs_them():
    model, data = nn.Sequential(nn.Linear(64, 48), nn.Linear(48, 8)).eval(), [torch.rand(1, 64) for _ in range(100)]
    eight = fxq.Recipe.weight_only(backend="reference")
    for recipe, count in ((eight, 32), (FOUR_BITS, 64), (eight.override("1", FOUR_BITS.config), 64)):
        observed = fxq.calibrate(fxq.prepare(model, recipe, example_inputs=data[0]), data)
        assert sum(len(batch.args[0]) for batch in observed.manager.context.samples) == count


class PeakOfTensors(TorchDispatchMode):
    """Peak of the bytes of the tensors that ops return and that are still alive."""

    def __init__(self):
        super().__init__()
        self.peak, self._alive = 0, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        inputs = {storage.data_ptr() for storage in map(torch.Tensor.untyped_storage, tensors((args, kwargs)))}
        for storage in map(torch.Tensor.untyped_storage, tensors(result)):
            address = storage.data_ptr()
            if address and address not in inputs and address not in self._alive:
                self._alive[address] = storage.nbytes()
                weakref.finalize(storage, self._alive.pop, address)
        self.peak = max(self.peak, sum(self._alive.values()))
        return result


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("inputs", "outputs"), [(640, 640), (1024, 600), (256, 2048)])
def test_its_memory_is_as_estimated(inputs, outputs, monkeypatch):
    model = nn.Sequential(nn.Linear(16, inputs), nn.ReLU(), nn.Linear(inputs, outputs)).eval()
    recipe = fxq.Recipe.weight_only(bits=4, backend="reference").override("0", fxq.FLOAT)
    run, peaks = Gptq.run, []

    def measured(self, rewriter):
        with PeakOfTensors() as tensors_alive:
            run(self, rewriter)
        peaks.append(tensors_alive.peak)

    monkeypatch.setattr(Gptq, "run", measured)
    fxq.quantize(model, recipe, data=[torch.randn(64, 16)])
    layer = nn.Sequential(nn.Linear(inputs, outputs))
    base, estimate = (
        fxq.estimate_memory(layer, FOUR_BITS, data=False),
        fxq.estimate_memory(layer, FOUR_BITS, data=True),
    )
    estimated = estimate.peak - base.peak + 2 * layer[0].weight.nbytes  # which the estimate without data counts
    assert 0.85 * estimated < peaks[0] < 1.15 * estimated
    eight = fxq.Recipe.weight_only(bits=8)  # for which the pass does not run
    assert fxq.estimate_memory(layer, eight, data=True) == fxq.estimate_memory(layer, eight)
