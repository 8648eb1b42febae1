"""Tensors and texts in a file: values, strides, sharing, memory; and what is refused."""

import pytest
import torch
from safetensors import safe_open
from torch import nn

import fxq
from fxq.saved.container import read_container, read_json, write_container

pytestmark = pytest.mark.any_cpu
W = torch.arange(2 * 3 * 4 * 5.0).reshape(2, 3, 4, 5)
TENSORS = {
    "plain": W,
    "channels last": W.contiguous(memory_format=torch.channels_last),
    "one channel": torch.rand(4, 1, 3, 3).contiguous(memory_format=torch.channels_last),
    "transposed": W.reshape(6, 20).T,
    "part": torch.arange(100)[3:50:7],
    "expanded": torch.ones(1).expand(5),
    "number": torch.tensor(2.5),
    "empty": torch.empty(0, 7),
    "flags": torch.tensor([True, False]),
    "half": torch.rand(3).half(),
    "bfloat": torch.rand(3, 3).bfloat16(),
    "bytes": torch.arange(255, dtype=torch.uint8),
    "odd": torch.rand(13),
}


def there_and_back(path, tensors, **texts):
    write_container(path, tensors, texts)
    held = read_container(path)
    return held.tensors, held.texts


def test_values_types_and_strides(tmp_path):
    tensors, texts = there_and_back(tmp_path / "a" / "m.fxq", TENSORS, graph="x = 1\n", note="ü\0")
    assert texts == {"graph": "x = 1\n", "note": "ü\0"} and list(tensors) == list(TENSORS)
    for name, tensor in TENSORS.items():
        assert torch.equal(tensors[name], tensor) and tensors[name].dtype == tensor.dtype
        if name not in ("part", "expanded"):  # these have gaps, or the same value in many places
            assert tensors[name].stride() == tensor.stride(), name
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["m.fxq"]


def test_floats_begin_where_torch_begins(tmp_path):
    """Sums of floats are rounded otherwise elsewhere."""
    tensors, _ = there_and_back(tmp_path / "m.fxq", TENSORS)
    assert all(tensor.data_ptr() % 64 == 0 for tensor in tensors.values() if tensor.is_floating_point())


def test_it_is_a_safetensors_file(tmp_path):
    there_and_back(tmp_path / "m.fxq", TENSORS, graph="x")
    with safe_open(tmp_path / "m.fxq", framework="np") as file:
        assert file.metadata()["graph"] == "x" and file.metadata()["version"] == "1"
        assert (file.get_tensor("plain") == W.numpy()).all()


def test_parameters_and_what_is_shared(tmp_path):
    shared = nn.Parameter(torch.rand(4))
    saved = {
        "a": shared,
        "b": shared,
        "c": nn.Parameter(torch.rand(2), False),
        "d": shared.detach(),
        "e": torch.rand(4),
    }
    stored, _ = there_and_back(tmp_path / "m.fxq", saved)
    assert stored["a"] is stored["b"] and stored["a"] is not stored["d"]
    assert stored["a"].data_ptr() == stored["d"].data_ptr() != stored["e"].data_ptr()
    assert [isinstance(t, nn.Parameter) for t in stored.values()] == [True, True, True, False, False]
    assert stored["a"].requires_grad and not stored["c"].requires_grad
    with safe_open(tmp_path / "m.fxq", framework="pt") as file:
        assert sorted(file.keys()) == ["a", "c", "e"]


def test_the_memory_is_the_files_until_it_is_written_to(tmp_path):
    path = tmp_path / "m.fxq"
    stored, _ = there_and_back(path, {"w": torch.zeros(64, dtype=torch.int8)})
    before = path.read_bytes()
    stored["w"].add_(1)
    assert path.read_bytes() == before and int(stored["w"].sum()) == 64


def test_a_file_is_replaced_while_it_is_mapped(tmp_path):
    path = tmp_path / "m.fxq"
    stored, _ = there_and_back(path, {"w": torch.ones(1 << 20, dtype=torch.int8)})
    write_container(path, {"w": stored["w"]}, {})
    write_container(path, {"w": torch.zeros(1)}, {})
    assert int(stored["w"].sum()) == 1 << 20 and read_container(path).tensors["w"].shape == (1,)


def test_what_no_file_holds(tmp_path):
    for tensor in (torch.ones(2).to_sparse(), torch.ones(2, device="meta"), torch.ones(2, dtype=torch.complex128)):
        with pytest.raises(fxq.InputError, match=r"the tensor .w. is .*: a file holds plain tensors only"):
            write_container(tmp_path / "m.fxq", {"w": tensor}, {})
    with pytest.raises(fxq.InputError, match="take more than 95 MiB"):
        write_container(tmp_path / "m.fxq", {}, {"graph": "x" * 100_000_001})
    (tmp_path / "file").write_text("")
    with pytest.raises(fxq.RenderError, match="cannot write"):
        write_container(tmp_path / "file" / "m.fxq", {}, {})
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_what_is_no_such_file(tmp_path):
    (tmp_path / "text").write_text("graph")
    (tmp_path / "folder").mkdir()
    for name in ("none", "text", "folder"):
        with pytest.raises(fxq.FileError, match=f"cannot load '.*{name}': "):
            read_container(tmp_path / name)


def test_json():
    assert read_json('{"a": [1, Infinity]}') == {"a": [1, float("inf")]}
    for text in ("", "{", "[" * 100_000, '{"a": 1, "a": 1}'):
        with pytest.raises(fxq.InputError, match=r"JSON is invalid|a key twice"):
            read_json(text)
