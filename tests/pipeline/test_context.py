"""Context of a run: the config of an op, the recipe line that changes it, and selectors that select nothing."""

import pytest
import torch
from torch import nn

import fxq
from fxq.common.data import Batch
from fxq.errors import RecipeError
from fxq.pipeline import float_ops
from tests.support.graphs import graph
from tests.support.helpers import REFERENCE, context, module

pytestmark = pytest.mark.any_cpu

X = torch.rand(2, 4)


def model():
    inner = module(lambda self, x: torch.relu(self.fc(x)), fc=nn.Linear(4, 4))
    return nn.Sequential(inner, nn.Linear(4, 2)).eval()


def test_the_last_override_that_fits_decides():
    eight = fxq.QuantConfig()
    four = fxq.QuantConfig(activation=fxq.TensorSpec(bits=4))
    own_context = context(model(), X, recipe=REFERENCE.override(fxq.by_op("linear"), four).override("0.*", fxq.FLOAT))
    assert own_context.config_for("1", "linear")[0] == four
    config, selector = own_context.config_for("0.fc", "linear")
    assert config.is_float and str(selector) == "'0.*'"
    assert own_context.config_for("1", "relu") == (own_context.recipe.config, None)
    assert own_context.recipe.config == eight


@pytest.mark.parametrize(("path", "op"), [("1", "linear"), ("0", "relu"), ("0.fc", "linear")])
def test_the_line_changes_the_op_that_it_is_given_for(path, op):
    net = model()
    line = context(net, X).override_line(path, op, "fxq.FLOAT")
    recipe = eval(line, {"recipe": REFERENCE, "fxq": fxq})
    ledger = fxq.quantize(net, recipe, data=[X]).ledger
    assert [(e.path, e.op) for e in ledger if e.reason.startswith("the recipe says float")] == [(path, op)]


def test_ops_with_other_configs_stay_apart():
    net = model()
    gm = graph(net, X)
    nodes = [n for n in gm.graph.nodes if n.op == "call_function"][:2]  # a linear layer and its relu
    assert context(net, X).refuses_to_join(nodes) is None
    with_float_relu = context(net, X, recipe=REFERENCE.override(fxq.by_op("relu"), fxq.FLOAT))
    assert with_float_relu.refuses_to_join(nodes) == "the recipe configures these ops differently"


def test_a_selector_that_selects_nothing_is_told_what_is_near():
    own_context = context(model(), X, recipe=REFERENCE.override("0.fcc", fxq.FLOAT))
    with pytest.raises(RecipeError, match=r"'0.fcc' selects nothing in this model; near: .*0\.fc"):
        own_context.check_selectors([("0.fc", "linear"), ("0", "relu"), ("1", "linear")])
    context(model(), X, recipe=REFERENCE.override("0.fc", fxq.FLOAT)).check_selectors([("0.fc", "linear")])


def test_types_are_those_of_all_modules_also_of_one_in_two_places():
    shared = nn.Linear(4, 4)
    own_context = context(nn.Sequential(shared, shared), X)
    assert own_context.types["0"] is own_context.types["1"] is nn.Linear


def reads(forward):
    """A model with a linear layer `f`, attention `a` and a recurrent layer `r`, both with steps first."""
    parts = {"f": nn.Linear(4, 4), "a": nn.MultiheadAttention(4, 2), "r": nn.GRU(4, 4)}
    return module(forward, **parts).eval()


WITHOUT_LATER_STEPS = nn.Transformer.generate_square_subsequent_mask(6)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("model", "shapes", "divisible"),
    [
        (reads(lambda self, x: self.f(x)), [(6, 4)], True),
        (reads(lambda self, x: self.r(self.f(x).transpose(0, 1))), [(6, 3, 4)], True),  # its state has samples second
        (reads(lambda self, x: self.f(x).flatten(0, 1)), [(6, 3, 4)], True),
        (reads(lambda self, x: (self.f(x), self.f.weight)), [(6, 4)], True),
        (reads(lambda self, x: self.f(x).mean(1)), [(1, 4)], True),  # nothing to cut
        (reads(lambda self, x: self.f(x).mean(0)), [(6, 4)], False),
        (reads(lambda self, x: self.f(x) @ self.f(x).T), [(6, 4)], True),
        (reads(lambda self, x: self.r(self.f(x))[0]), [(6, 3, 4)], False),
        (reads(lambda self, x: self.r(self.f(x).flip(0))[0].flip(0)), [(6, 3, 4)], False),
        (reads(lambda self, x: self.f(x + torch.arange(len(x))[:, None])), [(6, 4)], False),
        (reads(lambda self, x: self.a(x, x, x, attn_mask=WITHOUT_LATER_STEPS, is_causal=True, need_weights=False)[0]),
         [(6, 4)], False),
        (reads(lambda self, x, y: self.f(x) + self.f(y)), [(6, 4), (6, 4)], True),
        (reads(lambda self, x, y: self.f(x) @ y), [(6, 4), (4, 4)], False),
        (reads(lambda self, x, y: self.f(x).mean(-1) + y), [(6, 6, 4), (6, 6)], True),
        (reads(lambda self, x, y: y @ self.f(x)), [(6, 4), (6, 6)], False),
    ],
)  # fmt: skip
def test_what_may_be_cut(model, shapes, divisible):
    """A context whose graph computes the same for one row of its inputs alone as among the others, or not."""
    example = tuple(torch.rand(shape) for shape in shapes)
    assert fxq.prepare(model, REFERENCE, example_inputs=example).manager.context.divisible is divisible


def recorded(sizes, divisible=True):
    """A context that has recorded batches of so many samples; its example of 2 samples takes 8 multiplications."""
    model = nn.Sequential(nn.Linear(2, 2)).eval()
    own_context = fxq.prepare(model, REFERENCE, example_inputs=torch.rand(2, 2)).manager.context
    own_context.samples[:], own_context.divisible = [Batch((torch.rand(size, 2),)) for size in sizes], divisible
    return own_context


@pytest.mark.parametrize(
    ("sizes", "most", "wanted"),
    [
        ([5, 3], 6, [3, 3]),
        ([30, 2], 16, [14, 2]),
        ([16, 1], 16, [15, 1]),
        ([20, 20, 1], 100, [20, 20, 1]),
        ([1] * 8, 4, [1] * 4),
        ([2] * 5, 3, [1] * 3),
        ([0, 4], 3, [0, 2]),
    ],
)
def test_some_samples(sizes, most, wanted):
    """As many of each batch, as far as it has them; of more batches than samples, some, spread over all."""
    own_context = recorded(sizes)
    some = own_context.some_samples(most)
    assert [len(batch.args[0]) for batch in some] == wanted
    starts = [batch.args[0] for batch in own_context.samples]
    places = [i for i, whole in enumerate(starts) if any(torch.equal(x.args[0], whole[:1]) for x in some)]
    assert len(sizes) <= most or places[-1] >= len(sizes) // 2


@pytest.mark.parametrize(
    ("shapes", "large"), [([(2, 2), (99, 2)], False), ([(1, 2), (3, 6, 2)], True), ([], False), ([(0, 2)], False)]
)
def test_recorded_samples_may_be_larger_than_those_of_the_example(monkeypatch, shapes, large):
    """As with a language model, whose example has a few tokens: a sample of 6 x 2 takes 24 multiplications."""
    monkeypatch.setattr(float_ops, "_MIN_LARGE_MACS", 10)
    own_context = recorded([])
    own_context.samples[:] = [Batch((torch.rand(shape),)) for shape in shapes]
    assert own_context.is_large is large and not own_context.original.is_large


def test_sizes_of_samples_are_compared_by_the_names_of_the_arguments(monkeypatch):
    monkeypatch.setattr(float_ops, "_MIN_LARGE_MACS", 10)
    own_context = recorded([])
    x, mask = torch.rand(2, 2), torch.rand(2, 40)
    own_context.example = Batch((), {"x": x, "mask": mask})
    own_context.samples[:] = [Batch((), {"mask": mask, "x": x})]
    assert not own_context.is_large


@pytest.mark.parametrize(
    ("large", "divisible", "least", "sizes"),
    [
        (5, True, 2, [2, 1, 2, 1]),
        (0, True, 2, [1, 1, 1, 1]),
        (0, True, 6, [2, 1, 2, 1]),
        (0, True, 99, [2, 1, 2, 1]),
        (0, False, 2, [5, 3]),
        (99, True, 2, [3, 3]),
    ],
)
def test_samples_in_pieces(monkeypatch, large, divisible, least, sizes):
    monkeypatch.setattr(float_ops, "_MIN_LARGE_MACS", large)
    own_context = recorded([5, 3], divisible)
    pieces = own_context.in_pieces(6, least, 3)
    assert [len(piece.args[0]) for piece in pieces] == sizes
    few = (3 if large else sum(sizes) // 2) if divisible else None
    wanted = [batch.args[0][:few] for batch in own_context.samples]
    assert torch.equal(torch.cat([piece.args[0] for piece in pieces]), torch.cat(wanted))


@pytest.mark.parametrize("sizes", [[1] * 64, [30, 2], [64], [32, 2]])
def test_pieces_of_a_model_that_is_large_for_one_sample(monkeypatch, sizes):
    """Half of the samples, and 16 at least."""
    monkeypatch.setattr(float_ops, "_MIN_LARGE_MACS", 0)
    count = sum(len(piece.args[0]) for piece in recorded(sizes).in_pieces(64, 16, 8))
    assert count == max(sum(sizes) // 2, 16)


count = batches_read = 0
LOG: list[int] = []
HELD = {"calls": 0}


def logged(x):
    """Keeps state outside of modules, which does not affect its result."""
    global count
    count += 1
    HELD["calls"] += 1
    LOG.append(len(x))
    return x * 2


def test_variables_outside_the_modules_are_as_before_quantizing():
    """A function that a leaf calls counted all calls of calibration and of the passes: 25 of 4 batches."""

    def batches():
        global batches_read
        for _ in range(3):
            batches_read += 1
            LOG.append(-1)
            yield torch.rand(2, 4)

    outer = count, list(LOG), dict(HELD)
    leaf = module(lambda self, x: logged(self.fc(x)), fc=nn.Linear(4, 4))
    net = nn.Sequential(nn.Linear(4, 4), leaf, nn.Linear(4, 2)).eval()
    recipe = REFERENCE.leaf("1")
    qmodel = fxq.quantize(net, recipe, data=batches())
    assert (count, HELD) == (outer[0], outer[2])
    assert batches_read == 3 and LOG == [-1] * 3, "what the data loader changes stays"
    fxq.convert(fxq.calibrate(fxq.prepare(net, recipe, example_inputs=X), [X]))
    assert count == outer[0]
    qmodel(X)
    assert count == outer[0] + 1, "a call of the quantized model calls the function"
