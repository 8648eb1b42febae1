"""fold-batch-norm: batch norms into the layers before them."""

import pytest
import torch
from torch import nn

import fxq
from fxq.passes import FoldBatchNorm
from fxq.patterns.norm import norm_before_layer
from tests.graphs import again, expected, graph, program, run_pass, text, until
from tests.helpers import REFERENCE
from tests.models import batch, build, call, settled


class Layer(nn.Module):
    def __init__(self, layer, norm):
        super().__init__()
        self.layer, self.norm = layer, norm

    def forward(self, x):
        return self.norm(self.layer(x))


VARIANTS = {
    "conv1d": (lambda: Layer(nn.Conv1d(4, 6, 3), nn.BatchNorm1d(6)), (2, 4, 9)),
    "conv2d": (lambda: Layer(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6)), (2, 4, 9, 9)),
    "no bias": (lambda: Layer(nn.Conv2d(4, 6, 3, bias=False), nn.BatchNorm2d(6)), (2, 4, 9, 9)),
    "no affine": (lambda: Layer(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6, affine=False)), (2, 4, 9, 9)),
    "eps": (lambda: Layer(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6, eps=0.5)), (2, 4, 9, 9)),
    "grouped": (lambda: Layer(nn.Conv2d(4, 6, 3, groups=2), nn.BatchNorm2d(6)), (2, 4, 9, 9)),
    "depthwise": (lambda: Layer(nn.Conv2d(4, 4, 3, groups=4), nn.BatchNorm2d(4)), (2, 4, 9, 9)),
    "transposed": (lambda: Layer(nn.ConvTranspose2d(4, 6, 3, stride=2), nn.BatchNorm2d(6)), (2, 4, 5, 5)),
    "transposed grouped": (lambda: Layer(nn.ConvTranspose2d(4, 6, 2, groups=2), nn.BatchNorm2d(6)), (2, 4, 5, 5)),
    "conv3d": (lambda: Layer(nn.Conv3d(4, 6, 3), nn.BatchNorm3d(6)), (2, 4, 5, 5, 5)),
    "transposed 1d": (lambda: Layer(nn.ConvTranspose1d(4, 6, 3, stride=2), nn.BatchNorm1d(6)), (2, 4, 5)),
    "transposed 3d": (lambda: Layer(nn.ConvTranspose3d(4, 6, 2, groups=2), nn.BatchNorm3d(6)), (2, 4, 3, 3, 3)),
    "linear": (lambda: Layer(nn.Linear(4, 6), nn.BatchNorm1d(6)), (8, 4)),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_folds(name):
    make, shape = VARIANTS[name]
    model, x = settled(make), torch.randn(shape)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    manager = until(model, x, "fold-batch-norm")
    line = str(text(manager.gm)).splitlines()
    assert line[1].startswith("layer = ")
    assert "(x, @fxq_data.layer_weight_folded, @fxq_data.layer_bias_folded" in line[1]
    assert line[2:] == ["return layer"]
    wanted = call(model, x)
    torch.testing.assert_close(call(manager.gm, x), wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()))
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert again(manager, FoldBatchNorm()) == []


def test_text_before_and_after():
    model, x = build("residual"), batch("residual")
    manager = until(model, x, "fold-batch-norm")
    assert text(manager.history["canonicalize"].graph).splitlines()[3:5] == [
        "conv1 = conv2d(relu, @conv1.weight, padding=(1, 1))",
        "bn1 = batch_norm(conv1, @bn1.running_mean, @bn1.running_var, @bn1.weight, @bn1.bias)",
    ]
    assert text(manager.gm) == expected("""
        x = input
        stem = conv2d(x, @stem.weight, @stem.bias, padding=(1, 1))
        relu = relu(stem)
        conv1 = conv2d(relu, @fxq_data.conv1_weight_folded, @fxq_data.conv1_bias_folded, padding=(1, 1))
        relu_1 = relu(conv1)
        conv2 = conv2d(relu_1, @fxq_data.conv2_weight_folded, @fxq_data.conv2_bias_folded, padding=(1, 1))
        add = add(conv2, relu)
        relu_2 = relu(add)
        conv3 = conv2d(relu_2, @conv3.weight, @conv3.bias, stride=(2, 2), padding=(1, 1))
        down = conv2d(relu_2, @down.weight, @down.bias, stride=(2, 2))
        add_1 = add(conv3, down)
        relu_3 = relu(add_1)
        mean = mean(relu_3, dim=(2, 3))
        head = linear(mean, @head.weight, @head.bias)
        return head
    """)
    assert [e.rule for e in manager.history["fold-batch-norm"].edits][:2] == ["fold_batch_norm_conv2d"] * 2


def test_a_shared_conv_with_two_norms_gets_two_weights():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(4, 4, 3, padding=1)
            self.first, self.second = nn.BatchNorm2d(4), nn.BatchNorm2d(4)

        def forward(self, x):
            return self.second(self.conv(torch.relu(self.first(self.conv(x)))))

    model, x = settled(Model), torch.randn(2, 4, 6, 6)
    weight = model.conv.weight.detach().clone()
    gm = graph(model, x, "fold-batch-norm")
    assert "batch_norm" not in text(gm)
    torch.testing.assert_close(call(gm, x), call(model, x), rtol=1e-5, atol=1e-5)
    assert torch.equal(model.conv.weight, weight)


def test_two_norms_in_a_row():
    before = """
        x: float32[2, 4, 6, 6] = input()
        w: float32[6, 4, 3, 3] = tensor('conv.weight')
        b: float32[6] = tensor('conv.bias')
        conv = conv2d(x, w, b, stride=(2, 2))
        mean: float32[6] = tensor('mean')
        var: float32[6] = tensor('var')
        first = batch_norm(conv, mean, var)
        second = batch_norm(first, mean, var)
        return second
    """
    gm = run_pass(FoldBatchNorm(), before, NORM)
    assert program(gm) == expected("""
        x: float32[2, 4, 6, 6] = input()
        conv_weight_folded_weight_folded: float32[6, 4, 3, 3] = tensor('fxq_data.conv_weight_folded_weight_folded')
        conv_weight_folded_bias_folded: float32[6] = tensor('fxq_data.conv_weight_folded_bias_folded')
        conv: float32[2, 6, 2, 2] = conv2d(x, conv_weight_folded_weight_folded, conv_weight_folded_bias_folded, \
stride=(2, 2))
        return conv
    """)
    x = torch.randn(2, 4, 6, 6)
    torch.testing.assert_close(gm(x), fxq.read_graph(before, NORM)(x), rtol=1e-5, atol=1e-5)


NORM = {
    "conv.weight": torch.randn(6, 4, 3, 3),
    "conv.bias": torch.randn(6),
    "mean": torch.randn(6),
    "var": torch.rand(6) + 0.5,
}


class Inside(nn.Module):
    """The layer's value is read before the norm, too."""

    def __init__(self):
        super().__init__()
        self.layer, self.norm = nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)

    def forward(self, x):
        y = self.layer(x)
        return self.norm(y) + y


class RunTime(nn.Module):
    """The weight depends on the input."""

    def __init__(self):
        super().__init__()
        self.weight, self.norm = nn.Parameter(torch.randn(4, 4, 3, 3)), nn.BatchNorm2d(4)

    def forward(self, x):
        return self.norm(nn.functional.conv2d(x, self.weight * x.mean((0, 2, 3)).reshape(1, 4, 1, 1)))


@pytest.mark.parametrize(
    ("make", "shape", "reason"),
    [
        (lambda: Layer(nn.Linear(4, 6), nn.BatchNorm1d(5)), (2, 5, 4), "channels_are_not_the_second_axis"),
        (Inside, (2, 4, 6, 6), "%layer is also read by %add"),
        (RunTime, (2, 4, 6, 6), "weight_is_computed_at_run_time"),
        (lambda: Layer(nn.ReLU(), nn.BatchNorm2d(4)), (2, 4, 6, 6), ""),
    ],
)
def test_refuses(make, shape, reason):
    import fxq
    from fxq.patterns.norm import norm_after_layer

    model, x = settled(make), torch.randn(shape)
    gm = graph(model, x, "fold-batch-norm")
    assert "batch_norm(" in text(gm)
    assert torch.equal(call(gm, x), call(model, x))
    norm = next(n for n in gm.graph.nodes if "batch_norm" in str(n.target))
    told = [fxq.explain(rule, gm, norm) for rule in norm_after_layer]
    assert any(reason in line for line in told)
    quantized = fxq.quantize(model, REFERENCE, data=[x])  # and goes through the pipeline all the same
    assert call(quantized, x).shape == call(model, x).shape


# ---- into the layer behind it


class Ahead(nn.Module):
    """A batch norm with nothing to fold into before it."""

    def __init__(self, norm, layer):
        super().__init__()
        self.norm, self.layer = norm, layer

    def forward(self, x):
        return self.layer(self.norm(torch.relu(x)))


def centred(norm):
    """Without a shift, zeros of the output are zeros of the input."""
    norm.register_parameter("bias", None)
    norm.running_mean = torch.zeros_like(norm.running_mean)
    return norm


AHEAD = {
    "conv1d": (lambda: Ahead(nn.BatchNorm1d(4), nn.Conv1d(4, 6, 3)), (2, 4, 9)),
    "conv2d": (lambda: Ahead(nn.BatchNorm2d(4), nn.Conv2d(4, 6, 3, stride=2)), (2, 4, 9, 9)),
    "conv3d": (lambda: Ahead(nn.BatchNorm3d(4), nn.Conv3d(4, 6, 2)), (2, 4, 5, 5, 5)),
    "no bias": (lambda: Ahead(nn.BatchNorm2d(4), nn.Conv2d(4, 6, 3, bias=False)), (2, 4, 9, 9)),
    "no affine": (lambda: Ahead(nn.BatchNorm2d(4, affine=False), nn.Conv2d(4, 6, 3)), (2, 4, 9, 9)),
    "grouped": (lambda: Ahead(nn.BatchNorm2d(4), nn.Conv2d(4, 6, 3, groups=2)), (2, 4, 9, 9)),
    "depthwise": (lambda: Ahead(nn.BatchNorm2d(4), nn.Conv2d(4, 8, 3, groups=4)), (2, 4, 9, 9)),
    "linear": (lambda: Ahead(nn.BatchNorm1d(4), nn.Linear(4, 6)), (8, 4)),
}


@pytest.mark.parametrize("name", AHEAD)
def test_folds_into_the_layer_behind(name):
    make, shape = AHEAD[name]
    model, x = settled(make), torch.randn(shape)
    manager = until(model, x, "fold-batch-norm")
    shown = text(manager.gm).splitlines()
    assert shown[1] == "relu = relu(x)"
    assert "(relu, @fxq_data.layer_weight_folded, @fxq_data.layer_bias_folded" in shown[2]
    assert shown[3:] == ["return layer"]
    wanted = call(model, x)
    torch.testing.assert_close(call(manager.gm, x), wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()))
    assert again(manager, FoldBatchNorm()) == []


def test_padding_is_right_at_the_borders():
    """Zeros around the norm's output are not what it makes of zeros, unless it has no shift."""
    x = torch.randn(2, 4, 5, 5)
    model = settled(lambda: Ahead(nn.BatchNorm2d(4), nn.Conv2d(4, 6, 3, padding=1)))
    gm = graph(model, x, "fold-batch-norm")
    assert "batch_norm" in text(gm)
    torch.testing.assert_close(call(gm, x), call(model, x), rtol=1e-5, atol=1e-5)
    assert "padding_is_not_normalized" in fxq.explain(norm_before_layer[1], gm, "layer")
    model.norm = centred(model.norm)
    gm = graph(model, x, "fold-batch-norm")
    assert "batch_norm" not in text(gm)
    torch.testing.assert_close(call(gm, x), call(model, x), rtol=1e-5, atol=1e-5)


def test_a_norm_that_others_read_stays():
    same = expected("""
        x: float32[2, 6, 5, 5] = input()
        relu: float32[2, 6, 5, 5] = relu(x)
        mean: float32[6] = tensor('mean')
        var: float32[6] = tensor('var')
        norm: float32[2, 6, 5, 5] = batch_norm(relu, mean, var)
        w: float32[4, 6, 3, 3] = tensor('w')
        a: float32[2, 4, 3, 3] = conv2d(norm, w)
        b: float32[2, 4, 3, 3] = conv2d(norm, w)
        add: float32[2, 4, 3, 3] = add(a, b)
        return add
    """)
    assert program(run_pass(FoldBatchNorm(), same, {**NORM, "w": torch.randn(4, 6, 3, 3)})) == same
