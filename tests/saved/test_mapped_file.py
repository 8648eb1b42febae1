"""A model's file that is overwritten or cut off in place while the model is in use: right numbers, or an error."""

import copy
import shutil

import pytest
import torch
from torch import nn

import fxq
from fxq.errors import FileError
from fxq.saved import container
from fxq.saved.mapped_file import MappedFile
from tests.support.helpers import REFERENCE
from tests.support.processes import apart

pytestmark = pytest.mark.any_cpu

X = torch.linspace(-1, 1, 2 * 3 * 8 * 8).reshape(2, 3, 8, 8)


def use_while_it_changes(folder, most, change):
    """Load a.fxq, change the file, use the model in three ways, and write a line about each use to `lines`."""
    container.MAX_COPIED_BYTES = most
    x, wanted = torch.load(folder / "x.pt")
    qmodel = fxq.load(folder / "a.fxq")
    if change == "overwritten":
        shutil.copyfile(folder / "b.fxq", folder / "a.fxq")
    elif change == "cut":
        with (folder / "a.fxq").open("r+b") as file:
            file.truncate(10)
    elif change == "replaced":
        fxq.load(folder / "b.fxq").save(folder / "a.fxq")
    lines = []
    for use in (lambda: qmodel(x), lambda: copy.deepcopy(qmodel)(x), lambda: qmodel.save(folder / "c.fxq")):
        try:
            value = use()
            lines.append("right" if not isinstance(value, torch.Tensor) or torch.equal(value, wanted) else "wrong")
        except FileError as error:
            lines.append(str(error))
    (folder / "lines").write_text("\n".join(lines))


@pytest.mark.one_in(6)
@pytest.mark.parametrize(
    ("most", "change", "says"),
    [
        (1 << 30, "overwritten", "right"),
        (1 << 30, "cut", "right"),
        (0, "overwritten", "a.fxq was changed in place"),
        (0, "cut", "a.fxq was changed in place"),
        (0, "replaced", "right"),
        (0, "nothing", "right"),
    ],
)
def test_a_file_that_changes_while_its_model_is_in_use(tmp_path, most, change, says):
    """In a process of its own: reading a map past the end of its file kills the process."""
    torch.manual_seed(0)
    models = [fxq.quantize(nn.Sequential(nn.Conv2d(3, 8, 3), nn.PReLU()).eval(), REFERENCE, data=[X]) for _ in range(2)]
    for model, name in zip(models, "ab", strict=True):
        model.save(tmp_path / f"{name}.fxq")
    torch.save((X, models[0](X)), tmp_path / "x.pt")
    apart(lambda: use_while_it_changes(tmp_path, most, change))
    lines = (tmp_path / "lines").read_text().splitlines()
    assert len(lines) == 3 and all(says in line for line in lines), lines


def test_a_mapped_model_shares_the_memory_of_its_file(tmp_path, monkeypatch):
    """And its copies, which do not, run on when the file changes."""
    model = fxq.quantize(nn.Sequential(nn.Conv2d(3, 8, 3), nn.PReLU()).eval(), REFERENCE, data=[X])
    path, wanted = model.save(tmp_path / "m.fxq"), model(X)
    assert fxq.load(path)._mapped is None
    monkeypatch.setattr(container, "MAX_COPIED_BYTES", 0)
    loaded = fxq.load(path)
    assert isinstance(loaded._mapped, MappedFile) and torch.equal(loaded(X), wanted)
    copied = copy.deepcopy(loaded)
    assert copied._mapped is None and copy.copy(loaded)._mapped is loaded._mapped
    with path.open("r+b") as file:
        file.write(b"\0")
    with pytest.raises(FileError, match=r"Load it again with fxq.load. To update a model file, rename"):
        loaded(X)
    assert torch.equal(copied(X), wanted)
