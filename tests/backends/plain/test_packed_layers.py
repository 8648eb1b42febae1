"""Layers with weights of 2, 3, 5 and 6 bits: their size, their numbers beside those of unpacked weights, and files."""

import copy
import pickle

import pytest
import torch
from torch import nn

import fxq
from fxq.backends.plain import weight_only
from fxq.backends.plain.few_rows import FewRowsProduct
from fxq.backends.plain.stored_weight import StoredWeight
from fxq.backends.plain.weight_only import WeightOnlyLinear
from fxq.common.metrics import nbytes
from fxq.quant.packing import PACKED_BITS, Packing
from tests.backends.plain.test_few_rows import EXACT, LOOPS, needs_numba

pytestmark = pytest.mark.any_cpu

OTHER_BITS = [bits for bits in PACKED_BITS if bits != 4]
"""Widths whose rows are in units."""


def both_forms(columns, bits, per, signed=False):
    """Random layer with packed integers, and with a byte for each."""
    torch.manual_seed(columns + bits)
    low = -(2 ** (bits - 1)) if signed else 0
    values = torch.randint(low, low + 2**bits, (37, columns), dtype=torch.int8 if signed else torch.uint8)
    shape = (37, -(-columns // per))
    grid = {"weight_scale": torch.rand(shape) + 0.5, "weight_zero_point": torch.randint(low, low + 2**bits, shape)}
    options = {"op": "linear", "settings": {}, "axis": 1, "block": per, "bias": torch.randn(37), **grid}
    packing = Packing((columns,), bits, signed)
    packed = WeightOnlyLinear(
        weight=packing.pack(values), packed=[packing.row], signed=packing.signed, bits=bits, **options
    )
    return packed, WeightOnlyLinear(weight=values, **options)


@pytest.mark.parametrize("bits", PACKED_BITS)
@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize(("columns", "per"), [(192, 64), (100, 32), (33, 33), (7, 3)])
def test_numbers_are_those_of_unpacked_integers(bits, signed, columns, per, monkeypatch):
    """In PyTorch, without compiled loops: bit for bit."""
    monkeypatch.setattr(weight_only, "loops_for", lambda *_: None)
    monkeypatch.setattr(weight_only, "_PIECE_ELEMENTS", 5 * columns)
    packed, unpacked = both_forms(columns, bits, per, signed)
    for rows in (1, 5, 40):
        x = torch.randn(rows, columns)
        torch.testing.assert_close(packed(x), unpacked(x), **EXACT)


@needs_numba
@pytest.mark.parametrize("bits", OTHER_BITS)
@pytest.mark.parametrize(("columns", "per"), [(192, 64), (576, 64), (100, 100), (97, 32), (33, 33), (160, 96)])
def test_compiled_products_are_those_of_unpacked_integers(bits, columns, per):
    """The loops unpack them to unsigned bytes: bit for bit those of uint8, but where digits are multiplied."""
    packed, unpacked = (kernel.stored_weight() for kernel in both_forms(columns, bits, per))
    few, few_of_bytes = (FewRowsProduct(LOOPS, weight, None) for weight in (packed, unpacked))
    values = few.floats(0, torch.empty(37, columns)).abs()
    real = values + values.amax(1, keepdim=True)
    for rows in (1, 2, 5, 16):
        x = torch.randn(rows, columns)
        exact = rows > 1 or not LOOPS.HAS_DIGITS
        error = (few(x) - few_of_bytes(x)).abs()
        assert (error <= (0 if exact else 2e-6) * (x.abs() @ real.T)).all()
    out, out_of_bytes = torch.empty(2, 37, columns)
    torch.testing.assert_close(few.floats(0, out), few_of_bytes.floats(0, out_of_bytes), **EXACT)


class Model(nn.Module):
    """One layer of each kind that stores weights."""

    def __init__(self):
        super().__init__()
        self.words, self.conv = nn.Embedding(50, 72), nn.Conv1d(72, 96, 3, padding=1)
        self.lstm, self.last = nn.LSTM(96, 32), nn.Linear(32, 200)

    def forward(self, x):
        return self.last(self.lstm(self.conv(self.words(x).transpose(1, 2)).transpose(1, 2))[0])


@pytest.mark.one_in(5)
@pytest.mark.parametrize("bits", [*OTHER_BITS, 7])
def test_models_are_as_small_as_their_bits_and_are_saved(bits, tmp_path):
    torch.manual_seed(0)
    model, x = Model().eval(), torch.randint(0, 50, (2, 9))
    recipe = fxq.Recipe.weight_only(bits=bits, per=64, optimize="coverage")
    qmodel = fxq.quantize(model, recipe.override("*", recipe.config), example_inputs=x)
    assert not qmodel.ledger.where(kind="unverified") and qmodel.ledger.weight_coverage == 1.0
    taken = 8 if bits == 7 else bits
    for entry in qmodel.ledger:
        if entry.weight_values:  # with scales of 16 bits, and at most zero points of 8, of 64 values or fewer
            assert taken < entry.weight_bits < taken + 0.08 * taken + 24 / 32
    weights = sum(p.numel() for p in model.parameters() if p.dim() > 1)
    assert nbytes(qmodel) < weights * (taken + 1.3) / 8 + 4 * 456  # and biases in float
    wanted = qmodel(x)
    qmodel.save(tmp_path / "m.fxq")
    for again in (fxq.load(tmp_path / "m.fxq"), copy.deepcopy(qmodel), pickle.loads(pickle.dumps(qmodel))):
        torch.testing.assert_close(again(x), wanted, **EXACT)
        assert nbytes(again) == nbytes(qmodel)


def test_a_kernel_of_an_earlier_version_has_4_bits_for_fewer():
    """Its options have no width."""
    packed, unpacked = both_forms(96, 2, 32)
    config = {key: value for key, value in packed.config().items() if key != "bits"}
    tensors = dict(packed.named_buffers()) | {"weight": Packing((96,), 4, False).pack(unpacked.weight)}
    old = WeightOnlyLinear.from_config(config, tensors)
    assert old.bits == 4
    x = torch.randn(40, 96)
    torch.testing.assert_close(old(x), unpacked(x), rtol=1e-5, atol=1e-4)  # sums in another order


def test_a_kernel_with_half_a_row_of_4_bits_and_one_of_3_have_equal_floats():
    values = torch.randint(0, 8, (5, 70), dtype=torch.uint8)
    forms = (Packing((70,), bits, False) for bits in (3, 4))
    a, b = (StoredWeight(form.pack(values), torch.tensor(0.5), packing=form) for form in forms)
    torch.testing.assert_close(a.floats(a.empty()), b.floats(b.empty()), **EXACT)
    torch.testing.assert_close(a.floats(a.empty()), values * 0.5, **EXACT)
