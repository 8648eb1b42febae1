"""Convolutions whose result stays in float: ConvInteger in ONNX Runtime, and what it computes."""

import pytest
import torch
from torch import nn

import fxq
from fxq.common.metrics import sqnr
from tests.support.helpers import module
from tests.support.onnx_runs import exact_session

pytestmark = pytest.mark.any_cpu
RECIPE = fxq.Recipe.static(backend="onnxruntime", optimize="coverage")


def kinds(qmodel, x):
    """Op types of the nodes that ONNX Runtime runs, by its profile."""
    return [layer.op for module in qmodel.modules() if hasattr(module, "layers") for layer in module.layers(x)]


def normal(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("layer", "x"),
    [
        (nn.Conv1d(3, 5, 3, padding=1), normal(2, 3, 9)),
        (nn.Conv2d(3, 5, 3, stride=2, padding=2, dilation=2), normal(2, 3, 9, 8)),
        (nn.Conv2d(4, 8, 3, padding=1, groups=2, bias=False), normal(1, 4, 7, 7)),
        (nn.Conv2d(6, 6, 3, groups=6), normal(3, 6, 7, 7)),
        (nn.Conv3d(2, 3, 2, padding=1), normal(1, 2, 5, 5, 5)),
    ],
)
@pytest.mark.parametrize("after", [(), (nn.ReLU(),), (nn.Sigmoid(),)])
def test_it_is_the_convolution_of_the_integers(layer, x, after):
    """The zero point is not 0, so that the padding matters."""
    torch.manual_seed(0)
    qmodel = fxq.quantize(nn.Sequential(layer, *after).eval(), RECIPE, data=[x])
    exact = fxq.quantize(nn.Sequential(layer, *after).eval(), RECIPE.with_backend("reference"), data=[x])
    assert qmodel.ledger.coverage == 1 and "ConvInteger" in kinds(qmodel, x)
    for images in (x, x[:1].flip(-1)):
        assert sqnr(exact(images), qmodel(images)) > 80  # sums in another order, and a bias of the accumulator's steps


def test_a_head_keeps_what_all_other_backends_keep():
    """The layers before the head are quantized to 8 bits and run in ONNX Runtime's integer kernels."""
    torch.manual_seed(0)

    def forward(self, x):
        y = torch.cat([self.boxes(self.b(x)) * 4, self.scores(self.b(x))], 1).flatten(2)
        boxes, scores = y.split((16, 8), 1)
        return boxes.reshape(x.shape[0], 4, 4, -1).softmax(1).sum(2), scores.sigmoid()

    body = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 16, 3, 1, 1), nn.ReLU())
    net = module(forward, b=body, boxes=nn.Conv2d(16, 16, 1), scores=nn.Conv2d(16, 8, 1)).eval()
    data, x = [torch.rand(2, 3, 32, 32) for _ in range(3)], torch.rand(4, 3, 32, 32)
    qmodel, reference = (
        fxq.quantize(net, RECIPE.with_backend(name), data=data) for name in ("onnxruntime", "reference")
    )
    op_types = kinds(qmodel, x)
    assert op_types.count("QLinearConv") == 2 * 2 and op_types.count("ConvInteger") == 2 and "Conv" not in op_types
    for ours, theirs, real in zip(qmodel(x), reference(x), net(x), strict=True):
        assert abs(sqnr(real, ours) - sqnr(real, theirs)) < 1  # 8 bits at the end would cost 2 to 10 dB


def test_an_exported_file_keeps_it_too(tmp_path):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1), nn.Sigmoid()).eval()
    x = torch.rand(2, 3, 9, 9)
    qmodel = fxq.quantize(net, RECIPE, data=[x])
    (y,) = exact_session(qmodel.export(tmp_path / "m.onnx")).run(None, {"input": x.numpy()})
    assert sqnr(qmodel(x), torch.from_numpy(y)) > 60  # one value of the layer before may be on the other side of a tie


def test_a_loaded_model_computes_so(tmp_path):
    torch.manual_seed(0)
    x = torch.rand(2, 3, 9, 9)
    qmodel = fxq.quantize(nn.Conv2d(3, 8, 3).eval(), RECIPE, data=[x])
    assert torch.equal(fxq.load(qmodel.save(tmp_path / "m.fxq"))(x), qmodel(x))
    assert kinds(qmodel, x).count("ConvInteger") == 1
