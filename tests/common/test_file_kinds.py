"""Files of other libraries are called by name, with what to do."""

import pickle
import re
import zipfile
from pathlib import Path

import pytest
import torch
from torch import nn

import fxq
from fxq.common.file_kinds import kind_of, no_module
from tests.support.helpers import REFERENCE

pytestmark = pytest.mark.any_cpu


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A file of each kind, written by the library that it is of."""
    folder = tmp_path_factory.mktemp("kinds")
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval()
    x = torch.rand(2, 4)
    torch.save(net.state_dict(), folder / "w.pt")
    torch.jit.trace(net, x).save(folder / "script.pt")
    (folder / "p.pkl").write_bytes(pickle.dumps({}))
    (folder / "llm.bin").write_bytes(b"GGUF\3" + bytes(20))
    qmodel = fxq.quantize(net, REFERENCE, data=[x])
    for name in ("m.onnx", "m.xml", "m.pt2"):
        qmodel.export(folder / name)
    (folder / "renamed.bin").write_bytes((folder / "m.onnx").read_bytes())
    qmodel.save(folder / "m.fxq")
    return folder


@pytest.mark.parametrize(
    ("name", "description"),
    [
        ("m.onnx", "an ONNX model"),
        ("renamed.bin", "an ONNX model"),
        ("m.xml", "an OpenVINO model, or other XML"),
        ("m.pt2", "a program of torch.export"),
        ("w.pt", "a file of torch.save"),
        ("script.pt", "a TorchScript program"),
        ("p.pkl", "a pickle"),
        ("llm.bin", "a GGUF model"),
    ],
)
def test_what_a_file_is(files, name, description):
    assert kind_of(files / name)[0] == description
    if description == "a GGUF model":
        with pytest.raises(fxq.InputError, match=r"has weights alone: pass the model that they belong to"):
            fxq.load(files / name)
    else:
        reads = f"{name}': it is {description}, but fxq.load reads only files of qmodel.save"
        with pytest.raises(fxq.FileError, match=re.escape(reads)):
            fxq.load(files / name)
    if name.endswith(".onnx"):
        fxq.quantize(str(files / name), fxq.Recipe.stored(backend="reference"), example_inputs=torch.rand(2, 4))
        return
    with pytest.raises(
        fxq.InputError, match=re.escape(f"the model is the path of {description}, but fxq takes an nn.Module")
    ):
        fxq.quantize(str(files / name), data=[torch.rand(2, 4)])


def test_files_of_which_nothing_is_known(files, tmp_path):
    for name, data in {"empty": b"", "zeros": bytes(64), "zip": b"PK\3\4"}.items():
        (tmp_path / name).write_bytes(data)
    with zipfile.ZipFile(tmp_path / "other.zip", "w") as archive:
        archive.writestr("a.txt", "a")
    for path in (*tmp_path.iterdir(), tmp_path / "nothing", tmp_path, files / "m.fxq", Path("a\0b")):
        assert kind_of(path) == ("", "")


def test_models_that_are_no_files():
    assert no_module(3) == ""
    with pytest.raises(fxq.InputError, match=r"model is a str, not an nn.Module"):
        fxq.quantize("resnet18", data=[torch.rand(2, 4)])
