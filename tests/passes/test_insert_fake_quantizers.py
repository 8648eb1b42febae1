"""insert-fake-quantizers: the graph that is trained, before and after, and what it warns of."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxq
from fxq.common.metrics import sqnr
from fxq.errors import FxqWarning, PassError
from fxq.passes import InsertFakeQuantizers
from fxq.quant.fake_quantize import FakeQuantizeValue, FakeQuantizeWeight
from tests.support.helpers import module, rewriter
from tests.support.trainings import QAT, nodes, prepared


def quantizers(model, kind=FakeQuantizeValue):
    return [m for m in model.modules() if isinstance(m, kind)]


def test_a_layer_with_batch_norm_and_relu():
    model = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 1)).eval()
    trained = prepared(model, torch.randn(2, 3, 8, 8))
    assert str(trained.history["insert-qdq"].graph).count("conv2d_relu") == 1
    assert nodes(trained) == [
        "input_1_fq: fxq_quantizers.input_1(input_1)",
        "_0_weight_fq: fxq_quantizers.0_weight(_0_weight_1)",
        "_0: conv2d(input_1_fq, _0_weight_fq, None)",
        "_1: 1(_0)",
        "_2_fq: fxq_quantizers._2(_1)",
        "_3_weight_fq: fxq_quantizers.3_weight(_3_weight_1)",
        "_3: conv2d(_2_fq, _3_weight_fq, _3_bias)",
    ]
    assert [q.nonnegative for q in quantizers(trained)] == [False, True]
    assert dict(trained.named_parameters()).keys() == dict(model.named_parameters()).keys()


def test_the_model_is_copied():
    model = nn.Sequential(nn.Linear(4, 4)).eval()
    trained = prepared(model, torch.randn(2, 4))
    own, copied = model[0].weight, dict(trained.named_parameters())["0.weight"]
    assert own is not copied
    assert torch.equal(own, copied)


def test_values_on_one_grid_share_a_quantizer_and_moved_ones_have_none():
    def forward(self, x):
        y = torch.cat([self.a(x), self.b(x)], 1)
        return self.c(F.max_pool2d(y, 2))

    a, b, c = nn.Conv2d(3, 4, 1), nn.Conv2d(3, 4, 1), nn.Conv2d(8, 2, 1)
    trained = prepared(module(forward, a=a, b=b, c=c), torch.randn(2, 3, 4, 4))
    calls = [line for line in nodes(trained) if "fxq_quantizers" in line and "weight" not in line]
    assert [line.partition(": ")[2] for line in calls] == [
        "fxq_quantizers.x(x)",
        "fxq_quantizers.a(a)",
        "fxq_quantizers.a(b)",
    ]


def test_a_limit_is_rounded_to_the_grid_that_its_input_has():
    """6 lies between two integers: what is clipped to it is on the grid with the integer that is nearest."""

    def forward(self, x):
        return self.a(F.relu6(x)) + self.b(x)

    model = module(forward, a=nn.Linear(4, 2), b=nn.Linear(4, 2))
    trained, x = prepared(model, 9 * torch.rand(8, 4)), 9 * torch.rand(64, 4)
    trained(x)
    with torch.no_grad():
        assert sqnr(trained.eval()(x), fxq.convert(trained)(x)) > 100  # float rounding alone


def test_equal_grids_of_different_values_stay_apart():
    def forward(self, x, y):
        return self.a(x) + self.b(y)

    x = torch.randn(2, 4)
    trained = prepared(module(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 4)), (x, x.clone()))
    assert sorted(q.label for q in quantizers(trained)) == ["%x (the model)", "%y (the model)"]


def test_a_relu_that_others_read_stays():
    def forward(self, x):
        y = F.relu(torch.erf(self.a(x)))  # in float
        return self.b(y) + torch.erf(y)

    trained = prepared(module(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 4)), torch.randn(2, 4))
    assert not any(q.nonnegative for q in quantizers(trained))
    assert any(": relu(" in line for line in nodes(trained))


def test_dropout_is_put_back():
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.ReLU(), nn.Dropout(0.25), nn.Linear(4, 2)).eval()
    trained = prepared(model, torch.randn(2, 4))
    lines = nodes(trained)
    at = [i for i, line in enumerate(lines) if line.partition(": ")[2].startswith(("1(", "3("))]
    assert [lines[i - 1].partition(":")[0] for i in at] == ["_0", "_2_fq"]  # after the layer, after the fake quantizer
    torch.manual_seed(0)
    x = torch.randn(64, 4)
    assert not torch.equal(trained(x), trained(x))
    trained.eval()
    assert torch.equal(trained(x), trained(x))


def test_dropout_that_cannot_be_put_back_is_told():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.never = nn.Linear(4, 4), nn.Dropout(0.5)

        def forward(self, x):
            return F.dropout(self.linear(x), 0.3, self.training)

    told = "the model's forward compute as in eval mode, although the model computes otherwise in train mode"
    with pytest.warns(FxqWarning, match=told):
        prepared(Net().eval(), torch.randn(2, 4))


def test_dropout_in_a_leaf_is_there():
    inner = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    recipe = fxq.Recipe.qat(backend="reference", leaf_modules=["1"])
    with warnings.catch_warnings(action="error", category=FxqWarning):
        prepared(nn.Sequential(nn.Linear(4, 4), inner).eval(), torch.randn(2, 4), recipe)


def test_weights_that_were_computed_stay_and_it_is_told():
    layer = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
    left = r"0\.parametrizations\.weight\.original, fxq_data\.0_weight are not trained: the graph does not use them"
    with pytest.warns(FxqWarning, match=left):
        trained = prepared(nn.Sequential(layer, nn.ReLU(), nn.Linear(4, 2)).eval(), torch.randn(2, 4))
    assert [name for name, _ in trained.named_parameters()] == ["0.bias", "2.bias", "2.weight"]


def test_parameters_that_nothing_reads_are_told():
    model = module(lambda self, x: self.a(x), a=nn.Linear(4, 4), never=nn.Linear(4, 4))
    with pytest.warns(FxqWarning, match=r"trained, never\.weight, never\.bias are not trained: the graph does not use"):
        prepared(model, torch.randn(2, 4))


def test_a_batch_norm_that_is_no_module_keeps_its_statistics():
    def forward(self, x):
        return F.batch_norm(self.conv(x), self.mean, self.var, self.gamma, None, self.training)

    model = module(forward, conv=nn.Conv2d(3, 4, 1), gamma=torch.rand(4) + 0.5)
    model.register_buffer("mean", torch.zeros(4))
    model.register_buffer("var", torch.ones(4))
    with pytest.warns(FxqWarning, match="batch norms called as functions, whose statistics are not updated"):
        trained = prepared(model, torch.randn(2, 3, 4, 4))
    trained(torch.randn(2, 3, 4, 4) + 5)
    assert trained.state_dict()["mean"].eq(0).all()
    assert dict(trained.named_parameters())["gamma"].requires_grad


def test_a_norm_before_its_layer_is_not_folded_into_it():
    model = nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 4, 1)).eval()
    trained = prepared(model, torch.randn(2, 3, 4, 4))
    assert nodes(trained)[0].endswith(": 0(input_1)")


def test_a_scale_for_several_channels():
    """The integers depend on what the batch norm makes of each channel: they are rounded as it scales them."""
    weight = fxq.TensorSpec(signed=True, symmetric=True, observer="minmax")
    recipe = fxq.Recipe.qat(backend="reference", weight=weight)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1)).eval()
    lines = nodes(prepared(model, torch.randn(2, 3, 8, 8), recipe))
    assert [line.partition(": ")[2].partition("(")[0] for line in lines[:7]] == [
        "fxq_quantizers.input_1",
        "norm_divisor",
        "scaled_channels",
        "fxq_quantizers.0_weight",
        "conv2d",
        "divided_channels",
        "1",
    ]


def test_weights_alone():
    trained = prepared(nn.Sequential(nn.Linear(4, 4), nn.GELU()).eval(), torch.randn(2, 4), QAT.override("*", ALONE))
    assert not quantizers(trained)
    assert len(quantizers(trained, FakeQuantizeWeight)) == 1


ALONE = fxq.QuantConfig(activation=None, state=None)


def test_a_pipeline_without_what_it_needs():
    gm = torch.fx.symbolic_trace(nn.Linear(2, 2))
    with pytest.raises(PassError, match=r"insert-fake-quantizers needs choose-grids before it; fxq\.prepare runs both"):
        InsertFakeQuantizers().run(rewriter(gm, torch.rand(1, 2)))
