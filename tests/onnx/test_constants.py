"""Constant folding: values of numbers and fixed sizes become constants of the ONNX model; random values do not."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxq
from fxq.errors import ExportError, FxqWarning
from tests.support.helpers import REFERENCE, module
from tests.support.onnx_runs import exact_session

pytestmark = pytest.mark.any_cpu


def rows(n):
    return torch.randn(n, 8, generator=torch.Generator().manual_seed(n))


def exported(forward, tmp_path, **options):
    """The exported model, and a function that runs its file."""
    torch.manual_seed(0)
    qmodel = fxq.quantize(module(forward, a=nn.Linear(8, 8)).eval(), REFERENCE, data=[rows(4)])
    session = exact_session(qmodel.export(tmp_path / "m.onnx", **options))
    return qmodel, lambda x: torch.from_numpy(session.run(None, {"x": x.numpy()})[0])


def identity(self, x):
    return self.a(x) @ (torch.eye(8) * 2)


def steps(self, x):
    return self.a(x) + torch.linspace(-1, 1, 8) + torch.logspace(0, 1, 8)


def fractions(self, x):
    return self.a(x) + torch.arange(0.5, 8.5) + torch.arange(0, 1, 1 / 8)


def grid(self, x):
    return self.a(x) + torch.meshgrid(torch.arange(8), torch.arange(8), indexing="ij")[0][3]


def count_of_a_shape(self, x):
    size = torch.tensor(x.shape)
    return self.a(x) + torch.arange(start=0, end=size[1].item(), step=1) + torch.arange(int(size[0] // 2) * 4)


def computed_shape(self, x):
    size = torch.tensor(x.shape)
    return torch.reshape(self.a(x), torch.Size(torch.cat([size[:1] * 2, size[1:] // 2])))


def shape_in_tensors(self, x):
    """Reshape, Gather, Slice and Range as onnx2torch writes them, in the head of a detector."""
    y = self.a(x)
    size = torch.tensor(y.shape, device=y.device)
    first = size[torch.tensor(0)].unsqueeze(0)
    y = torch.reshape(y, torch.Size(torch.cat([first, torch.tensor([2, 4])])))
    ends = torch.tensor(1), torch.tensor(2)
    return y[[slice(None), slice(*ends, 1)]] + torch.arange(0, torch.tensor(4).to(torch.float32).item(), 1)


def rows_of_identity(self, x):
    return self.a(x) + torch.eye(x.shape[0], 8)


def rows_of_steps(self, x):
    return self.a(x) + torch.linspace(0, 1, x.shape[0])[:, None]


OF_SIZES = (count_of_a_shape, computed_shape, shape_in_tensors, rows_of_identity, rows_of_steps)


@pytest.mark.one_in(2)
@pytest.mark.filterwarnings("error::fxq.FxqWarning", "ignore:.*ONNX Runtime with default options does not compute")
@pytest.mark.parametrize("forward", [identity, steps, fractions, grid])
def test_tensors_of_numbers(forward, tmp_path):
    qmodel, run = exported(forward, tmp_path)
    for n in (4, 1, 7):
        torch.testing.assert_close(run(rows(n)), qmodel(rows(n)), rtol=1e-5, atol=1e-4)  # sums in another order


@pytest.mark.filterwarnings("ignore:Using a non-tuple sequence")
@pytest.mark.parametrize(
    "forward", [count_of_a_shape, computed_shape, shape_in_tensors, rows_of_identity, rows_of_steps]
)
def test_what_follows_from_sizes_is_folded_where_these_are_fixed(forward, tmp_path, recwarn):
    qmodel, run = exported(forward, tmp_path, dynamic=False)
    torch.testing.assert_close(run(rows(4)), qmodel(rows(4)), rtol=1e-5, atol=1e-4)  # sums in another order
    assert not [w for w in recwarn if "sizes only" in str(w.message)]


@pytest.mark.one_in(2)
@pytest.mark.filterwarnings("ignore:Using a non-tuple sequence")
@pytest.mark.parametrize(
    "forward", [count_of_a_shape, computed_shape, shape_in_tensors, rows_of_identity, rows_of_steps]
)
def test_where_they_vary_the_default_file_has_those_of_the_example(forward, tmp_path):
    with pytest.warns(FxqWarning, match=r"takes inputs of the example's sizes only, \(float32\[4, 8\]\)"):
        qmodel, run = exported(forward, tmp_path)
    torch.testing.assert_close(run(rows(4)), qmodel(rows(4)), rtol=1e-5, atol=1e-4)  # sums in another order
    with pytest.raises(ExportError, match="cannot be written"):
        qmodel.export(tmp_path / "m.onnx", dynamic={"x": {0: "batch"}})


@pytest.mark.parametrize("dynamic", [True, False])
def test_what_is_left_to_chance_is_no_constant(dynamic, tmp_path):
    with pytest.raises(ExportError, match=r"randint.* creates a tensor from numbers"):
        exported(lambda self, x: self.a(x) + torch.randint(0, 9, (8,)), tmp_path, dynamic=dynamic)


def test_groups_that_follow_from_the_batch(tmp_path):
    """A grouped convolution that gives each sample its own weights."""

    def forward(self, x):
        y = self.a(x)
        return F.conv1d(y.reshape(1, -1, 8), self.w.repeat(x.shape[0], 1, 1), groups=x.shape[0] * 3)

    x = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0))
    net = module(forward, a=nn.Linear(8, 8)).eval()
    net.w = nn.Parameter(torch.randn(3, 1, 3, generator=torch.Generator().manual_seed(1)))
    qmodel = fxq.quantize(net, REFERENCE, data=[x])
    with pytest.raises(ExportError, match=r"conv1d: its group depends on a dynamic size"):
        qmodel.export(tmp_path / "m.onnx", dynamic={"x": {0: "batch"}})
    with pytest.warns(FxqWarning, match=r"its group depends on a dynamic size"):
        path = qmodel.export(tmp_path / "m.onnx")
    (y,) = exact_session(path).run(None, {"x": x.numpy()})
    torch.testing.assert_close(torch.from_numpy(y), qmodel(x), rtol=1e-5, atol=1e-4)  # sums in another order
