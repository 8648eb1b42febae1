"""State dicts have all numbers of a quantized model: loading one gives equal results, or it is refused."""

import copy
import io
import itertools
from functools import cache

import pytest
import torch
from torch import nn

import fxq
from fxq.backends.kernel import Kernel
from fxq.backends.packed.quantized_tensors import has_engine
from fxq.backends.qdq_form import FallbackKernel
from fxq.common.metrics import tensors
from fxq.errors import InputError
from tests.support import models
from tests.support.bound import functions, plain
from tests.support.graphs import equal
from tests.support.machine import needs_x86

X = torch.linspace(-1, 1, 2 * 3 * 8 * 8).reshape(2, 3, 8, 8)
BACKENDS = [
    pytest.param("x86", marks=needs_x86),
    pytest.param("fbgemm", marks=pytest.mark.skipif(not has_engine("fbgemm"), reason="needs fbgemm")),
    "reference",
]


def network(seed=0, channels=8, stride=1):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(3, channels, 3, padding=1), nn.Hardswish(), nn.Conv2d(channels, 4, 3, stride=stride), nn.Sigmoid(),
        nn.ConvTranspose2d(4, 4, 2), nn.Flatten(), nn.LazyLinear(5),
    ).eval()  # fmt: skip


def quantized(backend, seed=0, scale=1.0, recipe=None, **options):
    """Without a recipe, a copy of a model that is quantized once."""
    if recipe is None:
        return copy.deepcopy(quantized_once(backend, seed, scale, **options))
    model = network(seed, **options)
    model(X)
    return fxq.quantize(model, recipe, data=[X * scale])


@cache
def quantized_once(backend, seed, scale, **options):
    recipe = fxq.Recipe.static(backend=backend, optimize="coverage", reduce_range="activations")
    return quantized(backend, seed, scale, recipe, **options)


def saved(state):
    """Return a state dict after saving and loading with PyTorch's defaults: tensors and plain data only."""
    stream = io.BytesIO()
    torch.save(state, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_loading_gives_exactly_the_other_model(backend):
    mine, theirs = quantized(backend), quantized(backend, seed=1, scale=7.0)
    for _ in range(3):
        before = mine(X)
    expected = theirs(X)
    assert not torch.allclose(before, expected, rtol=0.1)
    assert str(mine.load_state_dict(saved(theirs.state_dict()))) == "<All keys matched successfully>"
    for _ in range(3):
        assert torch.equal(mine(X), expected)
    assert torch.equal(mine(3 * X), theirs(3 * X)) and torch.equal(copy.deepcopy(mine)(X), expected)
    assert torch.equal(plain(mine, X), expected) and len(functions(mine)) == 1
    for (path, own), (other_path, loaded) in zip(mine.qparams().items(), theirs.qparams().items(), strict=True):
        assert path == other_path and equal(own.weight_scale, loaded.weight_scale) and equal(own.weight, loaded.weight)
        assert (own.input_scale, own.input_zero_point) == (loaded.input_scale, loaded.input_zero_point)
        assert (own.output_scale, own.output_zero_point) == (loaded.output_scale, loaded.output_zero_point)
        assert equal(own.bias, loaded.bias)


@pytest.mark.one_in(45)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", models.NETWORKS)
def test_every_network_takes_over_the_numbers_of_another(backend, name):
    """The other model has other ranges, since its weights and data differ."""
    recipe = fxq.Recipe.static(backend=backend, optimize="coverage", reduce_range="activations")
    model, batch = models.build(name), models.batch(name)
    other_model = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for module in other_model.modules():
            for parameter in () if isinstance(module, nn.PReLU) else module.parameters(recurse=False):
                parameter.mul_(0.5 + torch.rand(parameter.shape, generator=generator))
    mine = fxq.quantize(model, recipe, data=[batch])
    theirs = fxq.quantize(other_model, recipe, data=[models.batch(name, seed=2)])
    mine.load_state_dict(theirs.state_dict())
    expected = [*tensors(models.call(theirs, batch))]
    for _ in range(3):
        assert all(itertools.starmap(torch.equal, zip(tensors(models.call(mine, batch)), expected, strict=True)))


DIFFERENT = {
    "channels": ({"channels": 6}, "tensor '.*differs in its options, bits or shapes"),
    "stride": ({"stride": 2}, "(tensor|kernel|node) '.*(differs in its options, bits or shapes|is '.*' there)"),
    "bits": ({"bits": 6}, "(tensor|kernel|node) '.*differs in its options, bits or shapes"),
    "a layer in float": ({"float": True}, "node '.*' is '.*' there"),
}


@pytest.mark.one_in(12)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", DIFFERENT)
def test_another_structure_is_refused_by_name(backend, case):
    options, words = DIFFERENT[case]
    options = dict(options)
    bits = options.pop("bits", 7)
    recipe = fxq.Recipe.static(backend=backend, optimize="coverage", activation=fxq.TensorSpec(bits=bits))
    if options.pop("float", False):
        recipe = recipe.override("0", fxq.FLOAT)
    plain_recipe = fxq.Recipe.static(backend=backend, optimize="coverage", activation=fxq.TensorSpec(bits=7))
    mine, theirs = quantized(backend, recipe=plain_recipe), quantized(backend, seed=1, recipe=recipe, **options)
    for holder, other_qmodel in ((mine, theirs), (nn.Sequential(mine), nn.Sequential(theirs))):
        before = mine(X)
        with pytest.raises(InputError, match=rf"the state dict is of another model: .*{words}"):
            holder.load_state_dict(other_qmodel.state_dict())
        assert torch.equal(mine(X), before)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_part_of_a_state_dict_is_refused(backend):
    mine, theirs = quantized(backend), quantized(backend, seed=1)
    state, before = theirs.state_dict(), mine(X)
    for kept in (
        {k: v for k, v in state.items() if "weight" in k},
        {k: v for k, v in state.items() if k != "_extra_state"},
    ):
        with pytest.raises(InputError, match=r"has \d+ of \d+ entries of this quantized model; '.*' is missing"):
            mine.load_state_dict(kept, strict=False)
    assert torch.equal(mine(X), before)
    mine.load_state_dict({"another.weight": torch.ones(3)}, strict=False)  # nothing in it is of this model
    assert torch.equal(mine(X), before)


def test_grids_that_cannot_be_read_are_refused():
    mine = quantized("reference")
    state, before = mine.state_dict(), mine(X)
    with pytest.raises(InputError, match=r"'_extra_state' .* does not hold the grids of a quantized model"):
        mine.load_state_dict({**state, "_extra_state": state["_extra_state"][:-9]})
    assert torch.equal(mine(X), before)


def test_a_state_dict_holds_nothing_but_tensors():
    state = quantized("reference").state_dict()
    assert all(isinstance(value, torch.Tensor) for value in state.values())
    assert state["_extra_state"].dtype == torch.uint8


@pytest.mark.slow
@needs_x86
def test_forms_take_over_the_numbers_as_well():
    """The q/dq form of a kernel, which runs on other CPUs, has the loaded numbers."""
    recipe = fxq.Recipe.static(backend="x86", optimize="coverage", activation=fxq.TensorSpec(bits=7))
    mine, theirs = (quantized("x86", seed, scale, recipe) for seed, scale in ((0, 1.0), (1, 7.0)))
    expected = theirs(X)
    for stage in ("loaded, then in form", "in form, then loaded"):
        model = copy.deepcopy(mine)
        if stage.startswith("loaded"):
            model.load_state_dict(theirs.state_dict())
        for path, kernel in [(p, m) for p, m in model.fxq_kernels.named_children() if isinstance(m, Kernel)]:
            model.fxq_kernels.set_submodule(path, FallbackKernel.instead_of(kernel, "for the test"))
        if stage.startswith("in form"):
            before = model(X)  # every form has run, and keeps what it runs
            assert not torch.equal(before, expected)
            model.load_state_dict(theirs.state_dict())
        torch.testing.assert_close(model(X), expected, rtol=0, atol=0.02 * float(expected.abs().max()))
        for path, form in [(p, m) for p, m in model.fxq_kernels.named_children() if isinstance(m, FallbackKernel)]:
            model.fxq_kernels.set_submodule(path, form.kernel())
        assert torch.equal(model(X), expected)
