import math

import pytest
import torch
from torch import nn

from fxq.common.data import Batch, as_batch, batches, check_batch, first_of, pieces_of, place_in
from fxq.errors import CalibrationError, InputError
from tests.support.helpers import module

X, Y = torch.ones(2, 3), torch.zeros(2)
ONE = module(lambda self, x: x)
TWO = module(lambda self, x, y: x)
OPTIONAL = module(lambda self, x, scale=None: x)
OPEN = module(lambda self, *xs, **named: xs)
MORE, NAMED = module(lambda self, *xs: xs), module(lambda self, x, **named: x)


# ---- one batch


@pytest.mark.parametrize(
    ("value", "model", "args", "kwargs"),
    [
        (X, ONE, (X,), {}),
        ((X,), ONE, (X,), {}),
        ([X], ONE, (X,), {}),
        ((X, Y), ONE, (X,), {}),  # (input, target)
        ([X, 3], ONE, (X,), {}),
        ((X, Y), TWO, (X, Y), {}),
        ((X,), OPTIONAL, (X,), {}),
        (X, OPTIONAL, (X,), {}),
        ({"x": X}, ONE, (), {"x": X}),
        ({"x": X, "scale": Y}, OPTIONAL, (), {"x": X, "scale": Y}),
        ((X, Y), OPEN, (X, Y), {}),
        ({"anything": X}, OPEN, (), {"anything": X}),
        ((X, Y), MORE, (X, Y), {}),
        ((X, Y), NAMED, (X,), {}),  # (input, target): only names may follow
        ({"x": X, "anything": Y}, NAMED, (), {"x": X, "anything": Y}),
    ],
)
def test_the_spellings_of_a_batch(value, model, args, kwargs):
    batch = as_batch(value, model)
    assert [id(a) for a in batch.args] == [id(a) for a in args]
    assert {k: id(v) for k, v in batch.kwargs.items()} == {k: id(v) for k, v in kwargs.items()}


def test_a_batch_in_words():
    batch = Batch(
        ([torch.zeros(2, 3), (torch.zeros(1, dtype=torch.int64), "a")],), {"k": {"x": torch.ones(())}, "n": 3}
    )
    assert str(batch) == "([float32[2, 3], (int64[1], str)], k={'x': float32[]}, n=3)"


def test_a_batch_is_taken_as_it_is():
    batch = Batch((X,))
    assert as_batch(batch, ONE) is batch


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ((X, Y, Y), r"data, batch 3: 3 inputs, but forward takes 1 \(x\)"),
        ({"y": X}, "data, batch 3: forward has no argument 'y'; it has x. If 'x' is a dict itself"),
        ({1: X}, "forward has no argument 1"),
        ("x", "str is not a batch of inputs"),
        (None, "NoneType is not a batch of inputs"),
        ((), "tuple is not a batch of inputs"),
        (3.0, "float is not a batch of inputs; pass a tensor, a tuple or list of positional inputs, or a dict"),
    ],
)
def test_what_is_no_batch(value, message):
    with pytest.raises(InputError, match=message):
        as_batch(value, ONE, "data, batch 3")


def test_a_forward_of_any_number_of_inputs_has_no_names_and_one_of_any_names_no_further_inputs():
    with pytest.raises(InputError, match="forward has no argument 'x'; it has none"):
        as_batch({"x": X}, MORE)
    with pytest.raises(InputError, match=r"3 inputs, but forward takes 1 \(x\)"):
        as_batch((X, X, X), NAMED)


def test_a_pair_may_be_a_target_or_an_optional_argument():
    """The target was silently passed as the scale."""
    with pytest.raises(InputError, match=r"data: a pair is ambiguous.*'scale'.*Give \(x,\).*\{'x': x, 'scale': y\}"):
        as_batch((X, Y), OPTIONAL)


def test_a_batch_prints_dtypes_and_shapes():
    assert str(Batch((X, 3), {"mask": Y.bool()})) == "(float32[2, 3], 3, mask=bool[2])"


# ---- batches


def test_batches_come_one_by_one():
    taken = []

    def stream():
        for i in range(3):
            taken.append(i)
            yield torch.full((1,), float(i))

    first = next(batches(stream(), ONE))
    assert taken == [0] and float(first.args[0]) == 0.0
    assert [float(b.args[0]) for b in batches(stream(), ONE)] == [0.0, 1.0, 2.0]


def test_a_data_loader_of_pairs():
    dataset = torch.utils.data.TensorDataset(torch.arange(8.0).reshape(4, 2), torch.arange(4))
    loaded_batches = list(batches(torch.utils.data.DataLoader(dataset, batch_size=2), ONE))
    assert [b.args[0].tolist() for b in loaded_batches] == [[[0.0, 1.0], [2.0, 3.0]], [[4.0, 5.0], [6.0, 7.0]]]


@pytest.mark.parametrize("data", [X, "abc", b"abc", {"x": X}, 3, None])
def test_what_is_no_iterable_of_batches(data):
    with pytest.raises(InputError, match=f"data is a {type(data).__name__}; give an iterable of batches"):
        next(batches(data, ONE))


@pytest.mark.parametrize("data", [[], (), iter([])])
def test_no_batches(data):
    with pytest.raises(InputError, match="data is empty: give at least one batch"):
        list(batches(data, ONE))


def test_errors_name_the_batch():
    stream = batches([X, X, "no"], ONE)
    next(stream), next(stream)
    with pytest.raises(InputError, match="data, batch 2: str is not a batch"):
        next(stream)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_values_that_are_not_finite_name_batch_and_input(bad):
    holed = X.clone()
    holed[1, 2] = bad
    with pytest.raises(CalibrationError, match=r"data, batch 1: input 1 float32\[2, 3\] holds NaN or Inf"):
        list(batches([(X, X), (X, holed)], TWO))


def test_a_mask_may_hold_infinity():
    assert len(list(batches([(X, torch.full_like(X, -math.inf))], TWO))) == 1


def test_integers_and_empty_tensors_are_finite():
    check_batch(Batch((torch.arange(3), torch.empty(0, 3))), ONE, "data")


def test_another_device_than_the_model():
    with pytest.raises(InputError, match=r"data: input 0 is on meta, the model on cpu; move one of them with \.to"):
        check_batch(Batch((torch.empty(1, 4, device="meta"),)), nn.Linear(4, 4), "data")


# ---- samples


def test_samples_are_copies_of_the_first_rows():
    x, y = torch.arange(12.0).reshape(6, 2), [torch.arange(6), {"z": torch.ones(6, 1)}]
    kept = first_of(Batch((x, y), {"w": torch.zeros(6)}), 4)
    assert kept.args[0].tolist() == x[:4].tolist() and kept.args[1][0].tolist() == [0, 1, 2, 3]
    assert kept.args[1][1]["z"].shape == (4, 1) and kept.kwargs["w"].shape == (4,)
    x.zero_()
    assert kept.args[0].sum() == sum(range(8))


def test_samples_without_a_common_first_axis_are_whole():
    kept = first_of(Batch((torch.ones(6, 2), torch.ones(5)), {"flag": True}), 4)
    assert [t.shape for t in kept.args] == [(6, 2), (5,)] and kept.kwargs == {"flag": True}


def test_a_scalar_does_not_count_as_a_first_axis():
    kept = first_of(Batch((torch.ones(6, 2), torch.tensor(3.0))), 4)
    assert [t.shape for t in kept.args] == [(4, 2), ()]


def test_samples_hold_no_gradient():
    x = torch.ones(2, requires_grad=True)
    assert not first_of(Batch((x,)), 4).args[0].requires_grad


def test_named_tuples_among_the_inputs_are_kept():
    from collections import namedtuple

    Pair = namedtuple("Pair", "a b")
    kept = first_of(Batch((Pair(torch.ones(6), torch.zeros(6)),)), 4)
    assert isinstance(kept.args[0], Pair) and kept.args[0].b.shape == (4,)


def test_pieces_of_a_batch():
    x, y = torch.arange(10).view(5, 2), torch.arange(5)
    pieces = pieces_of(Batch((x,), {"y": y}), 2)
    assert [len(piece.args[0]) for piece in pieces] == [2, 2, 1]
    assert torch.equal(torch.cat([piece.args[0] for piece in pieces]), x)
    assert torch.equal(torch.cat([piece.kwargs["y"] for piece in pieces]), y)
    assert len(pieces_of(Batch((x, torch.zeros(3))), 2)) == 1  # no axis of samples


def test_where_some_samples_are_in_a_batch():
    x, y = torch.arange(12.0).reshape(6, 2), torch.arange(6)
    whole = Batch((x,), {"y": [y, 3]})

    def part(rows, number=3, shift=0):
        return Batch((x[rows] + shift,), {"y": [y[rows], number]})

    assert place_in(whole, whole) == 0
    assert [place_in(whole, part(slice(i, i + 2))) for i in (0, 3, 4)] == [0, 3, 4]
    assert place_in(whole, part(slice(0, 0))) is None
    assert place_in(whole, part(slice(1, 3), number=4)) is None
    assert place_in(whole, part(slice(1, 3), shift=1)) is None
    assert place_in(whole, part([0, 2])) is None
    assert place_in(whole, Batch((x[:2], [y[:2], 3]))) is None
    assert place_in(part(slice(0, 2)), whole) is None
