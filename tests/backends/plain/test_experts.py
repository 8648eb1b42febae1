"""Linear layers of experts: `torch._grouped_mm` with rounded weights. Only those of chosen experts are read."""

import copy
from itertools import pairwise

import pytest
import torch
from torch import nn

import fxq
from fxq.backends.plain.weight_only import WeightOnlyExperts
from fxq.common.metrics import sqnr

pytestmark = [pytest.mark.any_cpu, pytest.mark.filterwarnings("ignore::fxq.FxqWarning")]

EXPERTS, OUTPUTS, INPUTS = 4, 48, 64


class Experts(nn.Module):
    """Layer of which each row goes through one expert; the rows are in the order of their experts."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, OUTPUTS, INPUTS) * torch.rand(EXPERTS, OUTPUTS, 1))

    def forward(self, x, offs):
        return torch._grouped_mm(x, self.weight.transpose(1, 2), offs=offs)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return Experts().eval()


def batch(*counts):
    """Rows and their ends for these numbers of rows of the experts."""
    ends = torch.tensor(counts).cumsum(0).to(torch.int32)
    return torch.randn(sum(counts), INPUTS), ends


def by_hand(weight, x, offs):
    """Product of each row with the weight of its expert, float64."""
    starts = [0, *offs.tolist()]
    parts = [x[a:b].double() @ w.double().T for (a, b), w in zip(pairwise(starts), weight, strict=True)]
    return torch.cat(parts)


def kernel_of(qmodel):
    (kernel,) = (module for module in qmodel.modules() if isinstance(module, WeightOnlyExperts))
    return kernel


@pytest.mark.parametrize(
    ("recipe", "least"), [(fxq.Recipe.weight_only(), 38), (fxq.Recipe.weight_only(bits=4, per=32), 17)]
)
def test_experts_of_few_and_of_many_rows(model, recipe, least):
    qmodel = fxq.quantize(model, recipe, example_inputs=batch(3, 0, 5, 2))
    shots = {shot.name: shot.to_text() for shot in qmodel.history}
    assert "_grouped_mm" in shots["trace"] and "expert_linear" not in shots["trace"]
    assert "expert_linear" in shots["canonicalize"] and "_grouped_mm" not in shots["canonicalize"]
    stored = kernel_of(qmodel).stored_weight()
    weight = stored.floats(stored.empty()).view(EXPERTS, OUTPUTS, INPUTS)
    for counts in ((1, 0, 0, 0), (0, 2, 40, 7), (0, 0, 0, 0), (17, 16, 1, 0)):
        x, offs = batch(*counts)
        y = qmodel(x, offs)
        expected = by_hand(weight, x, offs)
        torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-4)  # float32 sums of 64 terms
        if len(x):
            assert sqnr(by_hand(model.weight.detach(), x, offs), y.double()) > least


def test_each_expert_has_scales_of_its_own_and_the_others_are_not_read(model):
    qmodel = fxq.quantize(model, "weight_only", example_inputs=batch(3, 1, 5, 2))
    kernel, (x, offs) = kernel_of(qmodel), batch(2, 0, 3, 0)
    assert kernel.weight_scale.shape == (EXPERTS * OUTPUTS,)
    before = qmodel(x, offs)
    changed = copy.deepcopy(qmodel)
    kernel_of(changed).weight_scale.view(EXPERTS, OUTPUTS)[[1, 3]] = float("nan")
    torch.testing.assert_close(changed(x, offs), before, rtol=0, atol=0)
    kernel_of(changed).weight_scale.view(EXPERTS, OUTPUTS)[2] = float("nan")
    after = changed(x, offs)
    assert after[2:].isnan().all() and torch.equal(after[:2], before[:2])


@pytest.mark.slow
def test_the_ledger_counts_them_and_files_hold_them(model, tmp_path):
    inputs = batch(3, 1, 5, 2)
    qmodel = fxq.quantize(model, "weight_only", example_inputs=inputs)
    (entry,) = qmodel.ledger.where(op="expert_linear")
    assert entry.precision == "weight-only" and entry.macs == 11 * OUTPUTS * INPUTS
    qmodel.save(tmp_path / "m.fxq")
    torch.testing.assert_close(fxq.load(tmp_path / "m.fxq")(*inputs), qmodel(*inputs), rtol=0, atol=0)
    with pytest.raises(fxq.ExportError, match="expert_linear"):
        qmodel.export(tmp_path / "m.onnx")


def test_dynamic_recipes_round_the_weights_alone(model):
    qmodel = fxq.quantize(model, fxq.Recipe.dynamic(backend="x86"), example_inputs=batch(3, 1, 5, 2))
    (entry,) = qmodel.ledger.where(op="expert_linear")
    assert entry.precision == "weight-only"


def test_a_product_with_computed_weights_stays():
    class Computed(nn.Module):
        def forward(self, x, weight, offs):
            return torch._grouped_mm(x, weight.transpose(1, 2), offs=offs)

    (x, offs), weight = batch(3, 1, 5, 2), torch.randn(EXPERTS, OUTPUTS, INPUTS)
    qmodel = fxq.quantize(Computed(), "weight_only", example_inputs=(x, weight, offs))
    (entry,) = qmodel.ledger.where(op="grouped_mm")
    assert entry.precision == "float" and entry.macs == 11 * OUTPUTS * INPUTS
    torch.testing.assert_close(qmodel(x, weight, offs), Computed()(x, weight, offs), rtol=0, atol=0)
