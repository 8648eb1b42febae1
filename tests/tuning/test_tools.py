"""The functions as a user calls them; what they find is asked in the tests of each."""

import pytest
import torch
from torch import nn

import fxq
from fxq.common.isolation import untouched
from tests.support.tuning_models import DATA, STATIC, wide


@pytest.mark.one_in(2)
@pytest.mark.parametrize("tool", [fxq.sensitivity, lambda *args, **kwargs: fxq.search(*args, target=42.0, **kwargs)])
def test_progress_is_shown_when_it_is_asked_for(tool, capsys):
    tool(wide(), STATIC, DATA, progress=False)
    assert capsys.readouterr().err == ""
    with untouched(model := wide()) as touched:
        tool(model, STATIC, DATA, progress=True)
    assert touched.buffers == [] and touched.attributes == {}


def test_presets_dicts_and_wrappers_are_taken():
    model = wide()
    plain = fxq.sensitivity(model, STATIC, DATA)
    assert fxq.sensitivity(nn.DataParallel(model).eval(), STATIC.to_dict(), iter(DATA)) == plain


@pytest.mark.slow
def test_dynamic_recipes_and_batches_of_other_sizes():
    data = [torch.rand(3, 3, 10, 10), {"x": torch.rand(5, 3, 10, 10)}]
    result = fxq.search(wide(), fxq.Recipe.dynamic(backend="reference"), data, target=60.0)
    assert result.reached and result.floats
    weights = fxq.sensitivity(wide(), fxq.Recipe.weight_only(backend="reference", bits=4), data)
    assert [row.path for row in weights] != [] and weights.output_sqnr < 40
    q = fxq.quantize(wide(), "dynamic", data=data)
    assert fxq.bisect(wide(), q, data, progress=True).output_sqnr > 20
