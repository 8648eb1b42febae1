"""A model's file that is overwritten or cut off in place while the model is in use: right numbers, or an error."""

import copy
import subprocess
import sys

import pytest
import torch
from torch import nn

import fxq
from fxq.errors import FileError
from fxq.files import container
from fxq.files.mapped_file import MappedFile
from tests.support.helpers import REFERENCE

pytestmark = pytest.mark.any_cpu

X = torch.linspace(-1, 1, 2 * 3 * 8 * 8).reshape(2, 3, 8, 8)

CODE = """
import shutil, sys
import torch, fxq
from fxq.files import container
folder, most, change = sys.argv[1], int(sys.argv[2]), sys.argv[3]
container.MAX_COPIED_BYTES = most
x, wanted = torch.load(folder + "/x.pt")
qmodel = fxq.load(folder + "/a.fxq")
if change == "overwritten":
    shutil.copyfile(folder + "/b.fxq", folder + "/a.fxq")
elif change == "cut":
    open(folder + "/a.fxq", "r+b").truncate(10)
elif change == "replaced":
    fxq.load(folder + "/b.fxq").save(folder + "/a.fxq")
ways = [lambda: qmodel(x), lambda: __import__("copy").deepcopy(qmodel)(x), lambda: qmodel.save(folder + "/c.fxq")]
for way in ways:
    try:
        found = way()
        print("right" if not isinstance(found, torch.Tensor) or torch.equal(found, wanted) else "wrong")
    except fxq.FileError as error:
        print(error)
"""


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
    """In a process of its own: reading a map behind the end of its file kills a process."""
    torch.manual_seed(0)
    made = [fxq.quantize(nn.Sequential(nn.Conv2d(3, 8, 3), nn.PReLU()).eval(), REFERENCE, data=[X]) for _ in range(2)]
    for model, name in zip(made, "ab", strict=True):
        model.save(tmp_path / f"{name}.fxq")
    torch.save((X, made[0](X)), tmp_path / "x.pt")
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(tmp_path), str(most), change], capture_output=True, text=True, cwd="/"
    )
    assert done.returncode == 0, (done.returncode, done.stderr)
    lines = done.stdout.splitlines()
    assert len(lines) == 3 and all(says in line for line in lines), done.stdout


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
