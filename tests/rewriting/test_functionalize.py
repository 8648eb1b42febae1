"""In-place changes of clones, views and created tensors, compared with the model that makes them in place."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxq
from fxq.common.metrics import sqnr
from tests.support.graphs import equal, graph
from tests.support.helpers import REFERENCE
from tests.support.models import call, settled

pytestmark = pytest.mark.any_cpu

X = torch.linspace(-2, 2, 32).sin().mul(2).reshape(4, 8)
PLACES, GRID = torch.tensor([0, 3]), torch.tensor([[0, 3, 1, 2]] * 4)


class Model(nn.Module):
    def __init__(self, forward):
        super().__init__()
        self.a, self.b, self.relu, self.run = nn.Linear(8, 8), nn.Linear(8, 8), nn.ReLU(inplace=True), forward

    def forward(self, x):
        return self.run(self, x)


def right(forward, tolerance_db=30):
    """Quantize, and check each call, and that no data is changed."""
    model, data = settled(lambda: Model(forward)), X.clone()
    expected = call(model, X.clone())
    assert equal(call(graph(model, data), data), expected)
    qmodel = fxq.quantize(model, REFERENCE, data=[data])
    assert torch.equal(data, X)
    for _ in range(3):
        own = X.clone()
        assert sqnr(expected, qmodel(own)) > tolerance_db
        assert torch.equal(own, X)
    return qmodel


CHANGES = {
    "zero_": lambda y, x: y.zero_(),
    "fill_": lambda y, x: y.fill_(2.0),
    "index_fill_": lambda y, x: y.index_fill_(1, PLACES, 0.0),
    "scatter_": lambda y, x: y.scatter_(1, GRID, 3.0),
    "copy_": lambda y, x: y.copy_(x * 2),
    "copy_ broadcast": lambda y, x: y.copy_(x[0]),
    "index_add_": lambda y, x: y.index_add_(1, PLACES, x[:, :2]),
    "index_copy_": lambda y, x: y.index_copy_(1, PLACES, x[:, :2]),
    "index_put_": lambda y, x: y.index_put_((PLACES,), x[0]),
    "addcmul_": lambda y, x: y.addcmul_(x, x),
    "lerp_": lambda y, x: y.lerp_(x * 3, 0.5),
    "cumsum_": lambda y, x: y.cumsum_(1),
    "masked_fill_": lambda y, x: y.masked_fill_(x > 0, 1.0),
    "masked_scatter_": lambda y, x: y.masked_scatter_(x > 0, x * 2),
    "fill_diagonal_": lambda y, x: y.fill_diagonal_(5.0),
    "gt_": lambda y, x: y.gt_(0),
    "mul_ by float64": lambda y, x: y.mul_(x.double()),
    "triu_": lambda y, x: y.triu_(),
    "out": lambda y, x: torch.add(x, 1, out=y),
    "out of a view": lambda y, x: torch.mul(x[:2], 3, out=y[:2]),
    "data": lambda y, x: y.data.mul_(2),
    "detach_": lambda y, x: y.detach_().mul_(2),
    "random": lambda y, x: y.bernoulli_(1.0),
    "slices": lambda y, x: y[:, :2].zero_(),
    "nested": lambda y, x: y[0][1:3].mul_(3),
    "view": lambda y, x: y.view(-1)[3:9].fill_(1.0),
    "transposed": lambda y, x: y.t()[2].fill_(4.0),
    "permuted": lambda y, x: y.permute(1, 0)[:2].add_(1),
    "unsqueezed": lambda y, x: y.unsqueeze(1)[:, 0, :4].zero_(),
    "squeeze_": lambda y, x: y.unsqueeze(0).squeeze_(0)[0].zero_(),
    "narrow": lambda y, x: y.narrow(1, 2, 3).zero_(),
    "select": lambda y, x: y.select(1, 2).copy_(x[:, 0]),
    "chunk": lambda y, x: y.chunk(2, 1)[1].mul_(2),
    "split": lambda y, x: torch.split(y, [3, 5], 1)[0].add_(x[:, :3]),
    "unbind": lambda y, x: y.unbind(0)[2].zero_(),
    "diagonal": lambda y, x: y.diagonal().fill_(5.0),
    "unfold": lambda y, x: y.unfold(1, 2, 2)[:, 0].zero_(),
    "as_strided": lambda y, x: y.as_strided((2, 2), (8, 1)).fill_(9.0),
    "relu": lambda y, x: F.relu(y[:2], inplace=True),
    "number": lambda y, x: y.__setitem__(0, 0.0),
    "ellipsis": lambda y, x: y[..., ::2].__iadd__(1),
    "None": lambda y, x: y.__setitem__((None, slice(1, 3)), 7.0),
    "from the end": lambda y, x: y.__setitem__((slice(-2, None), slice(None, None, 3)), x[:2, :3]),
    "mask": lambda y, x: y.__setitem__(x > 0, 0.0),
    "mask of rows": lambda y, x: y.__setitem__(x.sum(1) > 0, x[0]),
    "mask of columns": lambda y, x: y.__setitem__((slice(None), x[0] > 0), 1.0),
    "mask with values": lambda y, x: y.__setitem__(x > 0, y[x > 0] * 2),
    "places": lambda y, x: y.__setitem__((slice(None), PLACES), x[:, :2]),
    "list": lambda y, x: y.__setitem__((slice(None), [1, 2]), 0.0),
}


@pytest.mark.one_in(8)
@pytest.mark.parametrize("change", CHANGES)
def test_a_clone_that_is_changed(change):
    """Once the clone was removed, and the caller's input and the calibration data were overwritten."""

    def forward(self, x):
        y = x.clone()
        CHANGES[change](y, x)
        return self.b(self.a(x)) + y

    right(forward)


def scatter_add(self, x):
    o = torch.full((4, 8), 3.0)
    o.scatter_add_(1, GRID, self.a(x)[:, :4] * 0.05)
    return self.b(o)


def added_in_a_loop(self, x):
    o = torch.zeros(4, 8)
    for _ in range(3):
        o.add_(self.a(x))
    return self.b(o)


def columns(self, x):
    o = torch.zeros(4, 8)
    o[:, 2] = 5.0
    o[:, 3:] = self.a(x)[:, 3:]
    return self.b(o)


def read_before(self, x):
    o = torch.zeros(4, 8)
    y = self.a(x) + o
    o.add_(1.0)
    return self.b(y) + o


def through_a_view(self, x):
    o = torch.zeros(4, 8)
    view = o[:, :4]
    view.add_(self.a(x)[:, :4])
    view += 1
    return self.b(o) + o


def row_by_row(self, x):
    o = torch.empty(4, 8)
    for i, row in enumerate([o[i] for i in range(4)]):
        row.copy_(self.a(x)[i])
    return self.b(o)


def like_the_input(self, x):
    o = x.new_zeros(x.size(0), 8)
    o[x > 0] = 1.0
    o[1:3] += self.a(x)[1:3]
    return self.b(o)


def windows(self, x):
    mask, count = torch.zeros(4, 4), 0
    for rows in (slice(0, 2), slice(2, -1), slice(-1, None)):
        for columns in (slice(0, 2), slice(2, None)):
            mask[rows, columns] = count
            count += 1
    return self.b(mask @ self.a(x) * 0.1)


def of_a_parameter(self, x):
    h = self.a.bias.clone()
    h[0] = 0.0
    return self.b(self.a(x) + h)


def of_a_number(self, x):
    o = torch.tensor([1.0, 2.0])
    o[0] = 7.0
    return self.b(self.a(x) * int(o[0]) * 0.1) * o.sum()


def in_a_list(self, x):
    parts = [torch.zeros(8) for _ in range(4)]
    for i in range(4):
        parts[i] += self.a(x)[i]
    return self.b(torch.stack(parts))


def truths(self, x):
    y = self.a(x)
    some = y > 0
    some[0] = True
    some[:, 1] &= False
    some |= x > 1
    return self.b(y.masked_fill(some, 0.0))


def swapped_rows(self, x):
    y = self.a(x)
    y[0], y[1] = y[1] * 1, y[0] * 1
    y[2:] = y[:2]
    return self.b(y)


def laid_out_anew(self, x):
    y = self.a(x)
    y.unsqueeze_(0)
    z = y.squeeze(0)
    z.t_()
    y.mul_(2)
    return self.b(z.t()) + y.shape[0]


def shaped_twice(self, x):
    y = self.a(x)
    y.unsqueeze_(0)
    y.transpose_(1, 2)
    return self.b(y.transpose(1, 2))[0]


def shaped_after_a_change(self, x):
    y = self.a(x)
    y.add_(1.0).t_()
    z = y * 2
    y.unsqueeze_(0)
    return self.b(z.t()) + y[0].t()


def one_tensor_of_two_names(self, x):
    y = self.a(x)[:, :4]
    z, view = y.contiguous().relu_(), y[0]
    z.squeeze_()
    z.t_()
    view.add_(1.0)
    return self.b(torch.cat([z, z * 2])[:, :1].reshape(1, 8)) + z.t()[:, :1] + y[:, :1]


def copied_and_shaped(self, x):
    y = x[:, :4].clone()
    w = y.detach()
    z = y.copy_(self.a(x)[:, :4])
    z.t_()
    y.mul_(2.0)
    return self.b(torch.cat([y, z], 1)) + w[:, :1]


def the_input(self, x):
    x[:, 0] = 0.0
    x.relu_()
    return self.b(self.a(x))


def masks_of_ones(self, x):
    """The type of `ones_like` is given, so that it reads no more of `x` than its shape."""
    m, n = torch.ones_like(x, dtype=torch.bool), x.new_full(x.shape, 4, dtype=torch.long)
    m &= x > 0
    m |= x < -1
    m ^= x > 1.5
    n <<= m.long()
    n >>= (x > 1).long()
    n //= 3
    n **= 2
    n %= 5
    return self.b(self.a(x)) * m + n


def several_outs(self, x):
    y, rows = self.a(x), torch.zeros(4, 16)
    places, values, first = torch.empty(4, 8, dtype=torch.long), torch.empty(4), torch.empty(4, dtype=torch.long)
    torch.sort(y, out=(rows[:, 8:], places))
    largest = torch.max(y, 1, out=(values, first))
    top = torch.topk(y, 4, out=(rows[:, :4], places[:, :4]))
    columns = values[:, None] + first[:, None] + largest[1][:, None]
    return self.b(rows[:, :8].clone()) + rows[:, 8:] + places + columns + top[0][:, :1]


def sorted_in_place(self, x):
    y = self.a(x)
    torch.sort(y, out=(y, torch.empty(4, 8, dtype=torch.long)))
    return self.b(y)


def in_inference_mode(self, x):
    with torch.inference_mode():
        y, o = x.clone(), torch.zeros(4, 8)
        o.add_(self.a(x))
        o[:, :2] = 1.0
        y.index_fill_(1, PLACES, 0.0)
    return self.b(o) + y


@torch.inference_mode()
def decorated(self, x):
    y = self.a(x)
    y.add_(1.0)
    self.relu(y[:2])
    return self.b(y)


def moved_forwards(self, x):
    """Each element is read before it is overwritten, as PyTorch writes in the order of memory."""
    y, half = self.a(x), x.shape[1] // 2
    y[:, :-1] = y[:, 1:]
    y[:, ::2] += y[:, 1::2]
    y[:, :half] = y[:, half:]
    y[:, half - 1] += y[:, half]
    for i in range(1, 8):
        y[:, i] += 0.5 * y[:, i - 1]
    return self.b(y)


MADE = [masks_of_ones, several_outs, sorted_in_place, in_inference_mode, decorated, moved_forwards, scatter_add,
        added_in_a_loop, columns, read_before, through_a_view, row_by_row, like_the_input,
        windows, of_a_parameter, of_a_number, in_a_list, truths, swapped_rows, laid_out_anew, shaped_twice,
        shaped_after_a_change, one_tensor_of_two_names, copied_and_shaped, the_input]  # fmt: skip


@pytest.mark.one_in(8)
@pytest.mark.parametrize("forward", MADE)
def test_what_a_forward_makes_and_changes(forward, tmp_path):
    """Once, it was a constant that drifted from call to call."""
    qmodel = right(forward)
    qmodel.save(tmp_path / "m.fxq")
    assert equal(fxq.load(tmp_path / "m.fxq")(X), qmodel(X))


def test_a_branch_on_what_data_was_written_to_is_refused():
    def forward(self, x):
        o = torch.zeros(8)
        view = o[:4]
        view += self.a(x)[0, :4]
        return self.b(x) if o.sum() > 0 else x

    with pytest.raises(fxq.TraceError, match="a branch on a value that depends on the data"):
        graph(settled(lambda: Model(forward)), X)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda y: y.resize_(8, 4), "the op changes its size or storage"),
        (lambda y: setattr(y, "data", y * 2), r"an assignment to \.data"),
        (
            lambda y: torch.view_as_complex(y.view(4, 4, 2)).real.zero_(),
            "cannot write through this view",
        ),
        (lambda y: y.unfold(1, 2, 1)[:, 0].__setitem__(y[:, :2] > 0, 0.0), "part of %unfold, and elements of %unfold"),
        (lambda y: y.as_strided((4, 4), (2, 1))[0].mul_(2), "part of %as_strided, and elements of %as_strided"),
        (lambda y: y[:1].expand(4, 8).__setitem__(y > 0, 0.0), r"changes %expand in place: elements of %expand"),
        (lambda y: y[:1].expand_as(y)[0].zero_(), "part of %expand_as, and elements of %expand_as"),
        (lambda y: y.__setitem__((slice(None), slice(1, None)), y[:, :-1]), "shares some of these elements"),
        (lambda y: y[:, 1:].copy_(y[:, :-1]), r"reads %getitem.* Read from a copy: x\[1:\] = x\[:-1\].clone\(\)"),
        (lambda y: y[:, 1:].add_(y[:, :-1]), "PyTorch does not define whether it reads them before"),
        (lambda y: y.sub_(y[:, :1]), "shares some of these elements"),
        (lambda y: torch.sort(y, out=(torch.zeros(0), torch.zeros(0, dtype=torch.long))), "out= may resize it"),
        (lambda y: torch.from_numpy(np.zeros(4)).add_(y[:, 0]), r"no traced call makes it \(torch.from_numpy\)"),
    ],
)
def test_what_no_graph_can_hold_is_refused(change, why):
    def forward(self, x):
        y = self.a(x)
        change(y)
        return self.b(y.view(4, 8))

    with pytest.raises(fxq.TraceError, match=why):
        graph(settled(lambda: Model(forward)), X)


def windows_that_are_read(self, x):
    y = self.a(x)
    windows, rows, row = y.unfold(1, 2, 1), y[:1].expand(4, 8), y[:1].expand(1, 8)
    y.mul_(2)
    row.add_(1)
    return self.b(rows) + windows.mean()


def test_views_with_elements_that_share_memory_may_be_read():
    right(windows_that_are_read)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("wrong", ["another value", "an error"])
def test_a_graph_that_differs_without_changes_in_place_is_refused(wrong, monkeypatch):
    """After a (simulated) mistake of functionalization, the module stays a leaf, and the model is right."""

    class Inner(nn.Module):
        def forward(self, x):
            y = x * 1
            y[:, :2].add_(1.0)
            return y

    class Outer(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.a, self.inner = nn.Linear(8, 8), inner

        def forward(self, x):
            return self.inner(self.a(x))

    def written_back(rewriter, whole, view, value, before):
        return (
            whole
            if wrong == "another value"
            else rewriter.node("call_method", "view", (whole, 7), like=view, before=before, typed=((7,), torch.float32))
        )

    monkeypatch.setattr("fxq.rewriting.aliases.written_back", written_back)
    said = "computes something else" if wrong == "another value" else "does not run: .*shape"
    with pytest.raises(fxq.TraceError, match=rf"%add_ \(.*\) changes? memory in place.*{said}"):
        graph(settled(Inner), X)
    model = settled(lambda: Outer(Inner()))
    with pytest.warns(fxq.FxqWarning, match=f'layer "inner" .*{said}'):
        qmodel = fxq.quantize(model, REFERENCE, data=[X])
    assert sqnr(call(model, X), qmodel(X)) > 30


def test_a_module_with_hooks_overwrites_a_copy():
    def forward(self, x):
        y = x.clone()
        return self.b(self.a(x)) + self.relu(y)

    model = settled(lambda: Model(forward))
    model.relu.register_forward_hook(lambda module, args, result: result + 1)
    data = X.clone()
    qmodel = fxq.quantize(model, REFERENCE, data=[data])
    assert sqnr(call(model, X.clone()), qmodel(data)) > 30
    assert torch.equal(data, X)


def test_masks_as_in_wav2vec2_leave_all_layers_on_integers():
    """Once, one assignment by a mask made the whole model a float leaf."""

    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.features, self.project = nn.Conv1d(1, 16, 10, 5), nn.Linear(16, 16)
            self.layers = nn.ModuleList(
                nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(2)
            )
            self.embedding = nn.Parameter(torch.linspace(0, 1, 16))

        def forward(self, wave, lengths, masked):
            hidden = self.project(self.features(wave[:, None]).transpose(1, 2))
            heard = torch.zeros(hidden.shape[:2], dtype=torch.long, device=hidden.device)
            heard[(torch.arange(heard.shape[0]), lengths - 1)] = 1
            heard = heard.flip([-1]).cumsum(-1).flip([-1]).bool()
            hidden[masked] = self.embedding.to(hidden.dtype)
            hidden[~heard.unsqueeze(-1).repeat(1, 1, hidden.shape[2])] = 0
            for layer in self.layers:
                hidden = hidden + layer(hidden)
            return hidden

    model, generator = settled(Masked), torch.Generator().manual_seed(0)

    def batch(*lengths):
        masked = torch.zeros(len(lengths), 39, dtype=torch.bool)
        masked[0, 3:9] = True
        return torch.randn(len(lengths), 200, generator=generator), torch.tensor(lengths), masked

    data = [batch(39, 20), batch(7, 30)]
    qmodel = fxq.quantize(model, REFERENCE, data=data)
    assert qmodel.ledger.coverage == 1
    with torch.no_grad():
        for inputs in (*data, batch(12, 39, 1)):
            assert sqnr(model(*inputs), qmodel(*inputs)) > 30
