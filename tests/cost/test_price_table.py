"""The price table: estimates from sizes, for every kind of CPU."""

import pytest
import torch
from torch import nn

from fxq.backends import cpu
from fxq.cost.price_table import PriceTable, Work, float_works, kernel_works, read_table, table_for
from fxq.cost.prices import regions_of
from tests.support.graphs import until
from tests.support.helpers import REFERENCE

pytestmark = pytest.mark.any_cpu
KINDS = ("avx2", "avx2_vnni", "avx512", "avx512_vnni", "amx", "neon")


@pytest.mark.parametrize("backend", ["x86", "fbgemm", "qnnpack"])
@pytest.mark.parametrize("kind", KINDS)
def test_there_is_a_table_for_every_kind_of_cpu(backend, kind):
    """Larger layers take longer, in both forms."""
    table = table_for(backend, kind)
    for rows in (table.real, table.int8):
        small, large = (table.seconds(rows, [Work("conv", macs=m, elements=0.1, weights=0.01)]) for m in (1.0, 1000.0))
        assert 0 < small < large
    assert 0 < table.conversion("quantize", 1000) < table.conversion("quantize", 1_000_000)


def test_backends_that_measure_themselves_have_none():
    assert table_for("openvino") is None and table_for("jit") is None


def test_this_cpu_has_a_kind():
    assert cpu.kind() in KINDS and set(read_table()) <= set(KINDS)


def region_works(model, x):
    gm = until(model, x, "propagate", REFERENCE).gm
    regions = regions_of(gm, list(gm.graph.nodes))
    return [(float_works(gm, region), kernel_works(gm, region)) for region in regions.values()]


def test_sizes_of_a_convolution_are_counted_by_hand():
    """(1, 6, 10, 10) -> (1, 20, 8, 8), 3x3: channels are rounded up to 8 and 32."""
    ((real, int8),) = region_works(nn.Sequential(nn.Conv2d(6, 20, 3), nn.ReLU()).eval(), torch.rand(1, 6, 10, 10))
    conv, relu = real
    assert (conv.kind, relu.kind) == ("conv", "relu")
    assert conv.macs == pytest.approx(8 * 8 * 32 * 8 * 9 / 1e6)
    assert conv.elements == pytest.approx((600 + 1280) / 1e6) and conv.weights == pytest.approx(20 * 6 * 9 / 1e6)
    assert conv.gathered == pytest.approx(8 * 8 * 6 * 9 / 1e6)
    assert relu == Work("relu", elements=2 * 1280 / 1e6)
    assert int8 == (conv, Work("+relu", elements=2 * 1280 / 1e6))


class Squeeze(nn.Module):
    """A pool, and layers on what it leaves, in one unit."""

    def __init__(self):
        super().__init__()
        self.stem, self.down, self.up = nn.Conv2d(3, 16, 1), nn.Conv2d(16, 4, 1), nn.Conv2d(4, 16, 1)

    def forward(self, x):
        x = torch.relu(self.stem(x))
        y = torch.relu(self.down(nn.functional.adaptive_avg_pool2d(x, 1)))
        return x * torch.sigmoid(self.up(y))


def test_shapes_inside_a_unit_are_its_own():
    """Not those of its output: the layers work on one pixel."""
    works = [work for real, _ in region_works(Squeeze().eval(), torch.rand(1, 3, 8, 8)) for work in real]
    convs = [work for work in works if work.kind.startswith("conv")]
    assert [work.macs for work in convs] == pytest.approx([16 * 4 * 64 / 1e6, 16 * 16 / 1e6, 16 * 4 / 1e6])


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("layer", "x", "kind"),
    [
        (nn.Conv1d(16, 32, 3), (1, 16, 9), "conv"),
        (nn.Conv2d(16, 32, 1), (1, 16, 9, 9), "conv_1x1"),
        (nn.Conv2d(8, 8, 3, groups=8), (1, 8, 9, 9), "conv_depthwise"),
        (nn.Conv2d(8, 8, 3, groups=2), (1, 8, 9, 9), "conv_grouped"),
        (nn.Linear(8, 4), (3, 8), "linear"),
        (nn.Linear(8, 4), (1, 8), "linear_row"),
    ],
)
def test_kinds_of_layers(layer, x, kind):
    ((real, _),) = region_works(nn.Sequential(layer).eval(), torch.rand(x))
    assert real[0].kind == kind


def test_what_the_table_does_not_know_has_no_estimate():
    table = PriceTable({"relu": [1.0, 0.0, 2.0, 0.0, 0.0]}, {})
    assert table.seconds(table.real, [Work("relu", elements=3.0)]) == pytest.approx(7e-6)
    assert table.seconds(table.real, [Work("relu"), Work("tan")]) is None
