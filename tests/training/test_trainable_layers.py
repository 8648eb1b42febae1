"""Layers as they are trained: every kind of layer and batch norm computes what it did, with the model's own tensors."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import fxq
from fxq.errors import PassError
from fxq.training.trainable_layers import TrainableLayers, attach, divided_channels, norm_divisor
from tests.support.helpers import rewriter
from tests.support.trainings import QAT, prepared, trained


class NormAct(nn.BatchNorm2d):
    """A batch norm that does more, as timm's; with a parameter of its own."""

    def __init__(self, features):
        super().__init__(features)
        self.act = nn.PReLU(features)

    def forward(self, x):
        x = nn.functional.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, self.training, self.momentum, self.eps
        )
        return 2 * self.act(x)


class FixedNorm(nn.BatchNorm2d):
    """A batch norm whose statistics are not trained."""

    def forward(self, x):
        return nn.functional.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias)


PER_TENSOR = fxq.TensorSpec(signed=True, symmetric=True, observer="minmax")
KINDS = {
    "conv": lambda: (nn.Conv2d(4, 6, 3, groups=2), nn.BatchNorm2d(6)),
    "no bias": lambda: (nn.Conv2d(4, 6, 3, bias=False), nn.BatchNorm2d(6)),
    "not affine": lambda: (nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6, affine=False)),
    "transposed": lambda: (nn.ConvTranspose2d(4, 6, 3), nn.BatchNorm2d(6)),
    "transposed, grouped": lambda: (nn.ConvTranspose2d(4, 6, 3, groups=2), nn.BatchNorm2d(6)),
    "linear": lambda: (nn.Flatten(), nn.Linear(4 * 36, 6), nn.BatchNorm1d(6)),
    "with an activation": lambda: (nn.Conv2d(4, 6, 3), NormAct(6)),
    "fixed": lambda: (nn.Conv2d(4, 6, 3), FixedNorm(6)),
    "alone": lambda: (nn.ReLU(), nn.BatchNorm2d(4)),
}


def network(kind):
    """A network with statistics and weights of a batch norm as after a training, some below zero."""
    torch.manual_seed(0)
    model = nn.Sequential(*KINDS[kind](), nn.ReLU()).eval()
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
            if module.affine:
                nn.init.normal_(module.weight)
                nn.init.normal_(module.bias)
    return model


@pytest.mark.one_in(2)
@pytest.mark.parametrize("weight", [QAT.config.weight, PER_TENSOR], ids=["channel", "tensor"])
@pytest.mark.parametrize("kind", KINDS)
def test_before_ranges_are_known_only_weights_are_rounded(kind, weight):
    model, x = network(kind), torch.randn(8, 4, 6, 6)
    in_training = prepared(model, x, fxq.Recipe.qat(backend="reference", weight=weight)).eval()
    assert fxq.common.metrics.sqnr(model(x), in_training(x)) > 35
    assert dict(in_training.named_parameters()).keys() == dict(model.named_parameters()).keys()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("weight", [QAT.config.weight, PER_TENSOR], ids=["channel", "tensor"])
@pytest.mark.parametrize("kind", KINDS)
def test_statistics_and_gradients_are_those_of_the_float_model(kind, weight):
    """With weights of 8 bits, and values that are not rounded in the first forward: to what rounding weights leaves."""
    model, x = network(kind).train(), torch.randn(64, 4, 6, 6)
    in_training = prepared(model, x, fxq.Recipe.qat(backend="reference", weight=weight))
    for net in (model, in_training):
        net(x).square().mean().backward()
    for name, tensor in model.state_dict().items():
        if "running" in name:
            assert_close(in_training.state_dict()[name], tensor, rtol=0.05, atol=0.02)
    for name, parameter in in_training.named_parameters():
        own = dict(model.named_parameters())[name].grad
        assert_close(parameter.grad, own, rtol=0.05, atol=0.05 * float(own.abs().max()) + 1e-6)


@pytest.mark.parametrize("weight", [QAT.config.weight, PER_TENSOR], ids=["channel", "tensor"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_was_trained_is_folded_again(kind, weight):
    model = network(kind)
    in_training = prepared(model, torch.randn(8, 4, 6, 6), fxq.Recipe.qat(backend="reference", weight=weight))
    trained(in_training, [torch.randn(8, 4, 6, 6) for _ in range(3)])
    x = torch.randn(8, 4, 6, 6)
    with torch.no_grad():
        wanted = in_training.eval()(x)
    assert fxq.common.metrics.sqnr(wanted, fxq.convert(in_training)(x)) > 60


class Standardized(nn.Conv2d):
    """Its weight is computed in every forward."""

    def forward(self, x):
        w = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        return nn.functional.conv2d(x, w / w.std((1, 2, 3), keepdim=True), self.bias)


class Computes(nn.Module):
    """Values computed from parameters alone: positions, rows of a table, weights turned, shared or normed."""

    def __init__(self):
        super().__init__()
        self.embedding, self.positions, self.index = nn.Embedding(3, 5), nn.Parameter(torch.randn(7)), torch.arange(5)
        self.first, self.turned = nn.Linear(5, 6), nn.Parameter(torch.randn(5, 6))
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(6, 4))

    def forward(self, x):
        y = self.first(x + self.embedding(torch.arange(3)) * self.positions[self.index].exp())
        y = nn.functional.linear(y.relu(), self.first.weight.t())
        return self.normed((y.relu() @ self.turned).relu())


class Pads(nn.Module):
    """An embedding with a row that is not trained there, and is where a layer reads it."""

    def __init__(self):
        super().__init__()
        self.table, self.layer = nn.Embedding(8, 5, padding_idx=2), nn.Linear(5, 8)
        self.layer.weight = self.table.weight

    def forward(self, x):
        return self.layer(x + self.table((x * 2).long() % 8).sum(1, keepdim=True).sum(2))


COMPUTED = {
    "padding": lambda: (Pads(), (8, 3, 5)),
    "norm": lambda: (nn.Sequential(Standardized(4, 6, 3), nn.BatchNorm2d(6), nn.ReLU()), (8, 4, 6, 6)),
    "others": lambda: (Computes(), (8, 3, 5)),
}


@pytest.mark.parametrize("kind", COMPUTED)
def test_what_is_computed_of_parameters_is_trained(kind):
    """Its gradients are those of the float model, and convert computes it of what was trained."""
    torch.manual_seed(0)
    model, shape = COMPUTED[kind]()
    model = model.train()
    in_training = prepared(model, torch.randn(shape))
    x = torch.randn(shape)
    for net in (model, in_training):
        net(x).square().mean().backward()
    own = dict(model.named_parameters())
    assert dict(in_training.named_parameters()).keys() == own.keys()
    assert not any("constant" in name for name in in_training.state_dict())
    for name, parameter in in_training.named_parameters():
        assert_close(parameter.grad, own[name].grad, rtol=0.05, atol=0.05 * float(own[name].grad.abs().max()) + 1e-6)
    trained(in_training, [torch.randn(shape) for _ in range(3)], rate=0.1)
    with torch.no_grad():
        wanted = in_training.eval()(x)
    assert fxq.common.metrics.sqnr(wanted, fxq.convert(in_training)(x)) > 60


def test_a_channel_that_the_batch_norm_switches_off():
    model = network("conv")
    model[1].weight.data[0] = 0
    in_training = prepared(model, torch.randn(8, 4, 6, 6))
    trained(in_training, [torch.randn(8, 4, 6, 6)], rate=0.0)
    x = torch.randn(8, 4, 6, 6)
    assert_close(fxq.convert(in_training)(x), in_training.eval()(x), rtol=0, atol=1e-5)


def test_it_needs_the_model_as_it_was():
    gm = torch.fx.symbolic_trace(nn.Linear(2, 2))
    with pytest.raises(PassError, match="the-test needs canonicalize before it"):
        TrainableLayers(rewriter(gm, torch.rand(1, 2)), {})


def test_a_divisor_is_never_zero():
    var, gamma = torch.tensor([1.0, 3.0]), torch.tensor([0.0, -2.0])
    divisor = norm_divisor(var, gamma, 1.0)
    assert_close(divisor, torch.tensor([1e-12, -1.0]))
    y, bias = torch.ones(1, 2, 3), torch.tensor([0.0, 5.0])
    assert divided_channels(y, divisor, -2, bias)[0, 1].tolist() == [4.0] * 3
    assert divided_channels(y, divisor, -2, None)[0, 1].tolist() == [-1.0] * 3


def test_tensors_and_modules_are_attached_at_their_paths():
    root, layer = nn.Module(), nn.Linear(2, 2)
    attach(root, "a.b.weight", layer.weight)
    attach(root, "a.c", layer)
    attach(root, "a.d", torch.ones(1))
    assert set(root.state_dict()) == {"a.b.weight", "a.c.weight", "a.c.bias", "a.d"}
    assert root.a.b.weight is root.a.c.weight


class Texts(nn.Module):
    """Embedding, in a bag or not, whose scales of blocks are stored in float16."""

    def __init__(self, bag):
        super().__init__()
        self.embedding = (nn.EmbeddingBag if bag else nn.Embedding)(50, 64)
        self.head = nn.Linear(64, 5)

    def forward(self, tokens):
        """int64 (N, T) -> float32 (N, 5)."""
        y = self.embedding(tokens)
        return self.head(y if y.dim() == 2 else y.mean(1))


@pytest.mark.parametrize("bag", [False, True])
def test_embeddings_are_trained_and_converted(bag):
    torch.manual_seed(0)
    model, tokens = Texts(bag), torch.randint(0, 50, (8, 7))
    in_training = fxq.prepare(model, fxq.Recipe.qat(backend="reference"), example_inputs=tokens)
    optimizer = torch.optim.SGD(in_training.parameters(), 0.1)
    before = model.embedding.weight.detach().clone()
    for _ in range(3):
        optimizer.zero_grad()
        in_training(tokens).square().sum().backward()
        optimizer.step()
    in_training.eval()
    qmodel = fxq.convert(in_training)
    assert fxq.common.metrics.sqnr(in_training(tokens), qmodel(tokens)) > 40
    assert not torch.equal(dict(in_training.named_parameters())["embedding.weight"], before)
