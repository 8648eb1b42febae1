"""Weights in GPTQ, AWQ and compressed-tensors files, against integers that are packed here, one by one."""

import json
import resource

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import fxq
from fxq.checkpoints import compressed_tensors_files, gptq_files
from fxq.checkpoints.grid_weight import GridWeight, pack_words, unpack_words
from fxq.checkpoints.open_checkpoint import open_checkpoint
from fxq.errors import ExportError, FileError

pytestmark = pytest.mark.any_cpu

AWQ_PLACES = {0: 0, 1: 4, 2: 1, 3: 5, 4: 2, 5: 6, 6: 3, 7: 7}


def words(values, bits, place=lambda i: i):
    """Rows of integers as 32-bit words: value i of a word begins at bit bits * place(i)."""
    per = 32 // bits
    rows = []
    for row in values.tolist():
        row = [*row, *[0] * (-len(row) % per)]
        packed = [sum(v << (bits * place(i)) for i, v in enumerate(row[k : k + per])) for k in range(0, len(row), per)]
        rows.append(packed)
    return torch.from_numpy(np.array(rows, dtype=np.uint32).view(np.int32))


def example(rows, columns, block, bits, seed=0):
    """Integers (O, I), scales and zero points (O, groups), and the float weight, one value at a time."""
    g = torch.Generator().manual_seed(seed)
    q = torch.randint(0, 2**bits, (rows, columns), generator=g)
    scale = (torch.rand(rows, columns // block, generator=g) + 0.1).half()
    zero = torch.randint(1, 2**bits - 1, (rows, columns // block), generator=g)
    floats = [
        [(int(q[o, i]) - int(zero[o, i // block])) * np.float32(scale[o, i // block]) for i in range(columns)]
        for o in range(rows)
    ]
    return q, scale, zero, torch.tensor(np.array(floats, dtype=np.float32))


def folder(path, tensors, config):
    save_file({name: t.contiguous() for name, t in tensors.items()}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps({"quantization_config": config}))
    return path


def gptq_folder(path, bits=4, block=16, shift=1, order=None, **config):
    q, scale, zero, floats = example(32, 64, block, bits)
    tensors = {
        "a.qweight": words(q.t(), bits=32) if bits == 32 else words(q, bits).t(),
        "a.qzeros": words(zero.t() - shift, bits),
        "a.scales": scale.t(),
        "a.g_idx": torch.arange(64, dtype=torch.int32) // block if order is None else order,
        "a.bias": torch.ones(32),
    }
    return folder(path, tensors, {"quant_method": "gptq", "bits": bits, "group_size": block, **config}), floats


@pytest.mark.parametrize("missing", ["qzeros", "scales"])
def test_a_layer_without_one_of_its_tensors(missing, tmp_path):
    gptq_folder(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys() if name != f"a.{missing}"}  # noqa: SIM118
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(FileError, match=rf"'a.weight'.* no tensor 'a.{missing}'"):
        open_checkpoint(tmp_path)["a.weight"]


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("version", [1, 2])
def test_gptq(bits, version, tmp_path):
    more = {"checkpoint_format": "gptq_v2"} if version == 2 else {}
    path, floats = gptq_folder(tmp_path, bits, shift=2 - version, **more)
    read = open_checkpoint(path)
    assert sorted(read) == ["a.bias", "a.weight"]
    assert torch.equal(read["a.weight"].floats, floats) and torch.equal(read["a.bias"], torch.ones(32))
    assert read["a.weight"].grid.block == 16 and read["a.weight"].grid.bits == bits


def awq_folder(path):
    q, scale, zero, floats = example(32, 64, 16, 4)
    tensors = {
        "a.qweight": words(q.t(), 4, AWQ_PLACES.get),
        "a.qzeros": words(zero.t(), 4, AWQ_PLACES.get),
        "a.scales": scale.t(),
    }
    return folder(path, tensors, {"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemm"}), floats


def test_awq(tmp_path):
    path, floats = awq_folder(tmp_path)
    assert torch.equal(open_checkpoint(path)["a.weight"].floats, floats)


def compressed(bits, block, symmetric):
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": "group", "group_size": block}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_compressed_tensors(bits, symmetric, tmp_path):
    q, scale, zero, floats = example(20, 64, 16, bits)
    tensors = {"a.weight_packed": words(q, bits), "a.weight_scale": scale, "a.weight_shape": torch.tensor([20, 64])}
    if symmetric:
        floats = floats + (zero - 2 ** (bits - 1)).float().repeat_interleave(16, 1) * scale.float().repeat_interleave(
            16, 1
        )
    else:
        tensors["a.weight_zero_point"] = words(zero.t(), bits).t()
    read = open_checkpoint(folder(tmp_path, tensors, compressed(bits, 16, symmetric)))
    torch.testing.assert_close(read["a.weight"].floats, floats, rtol=2e-7, atol=2e-6 * symmetric)
    if not symmetric:
        del tensors["a.weight_zero_point"]
        with pytest.raises(FileError, match=r"no weight_zero_point, but .* not symmetric"):
            _ = open_checkpoint(folder(tmp_path, tensors, compressed(bits, 16, symmetric)))["a.weight"]


def test_whole_bytes_of_compressed_tensors(tmp_path):
    q = torch.randint(-128, 128, (6, 10)).to(torch.int8)
    tensors = {"a.weight": q, "a.weight_scale": torch.full((6, 1), 0.5)}
    config = {**compressed(8, None, True), "format": "int-quantized"}
    assert torch.equal(open_checkpoint(folder(tmp_path, tensors, config))["a.weight"].floats, q * 0.5)


@given(bits=st.sampled_from([2, 4, 8]), rows=st.integers(1, 4), columns=st.integers(1, 40))
def test_words_hold_what_they_got(bits, rows, columns):
    values = torch.randint(0, 2**bits, (rows, columns), dtype=torch.uint8)
    packed = pack_words(values, bits)
    assert torch.equal(packed, words(values, bits)) and torch.equal(unpack_words(packed, bits, columns), values)


@pytest.mark.parametrize("write", [gptq_files.write, compressed_tensors_files.write])
@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
def test_written_weights_are_read_again(write, signed, bits, tmp_path):
    q, scale, zero, floats = example(32, 64, 16, bits)
    shift = 2 ** (bits - 1) if signed else 0
    own = GridWeight.of((q - shift).to(torch.int8 if signed else torch.uint8), scale, zero - shift, 16, bits)
    tensors, config = write({"a.b": own})
    assert torch.equal(open_checkpoint(folder(tmp_path, tensors, config))["a.b.weight"].floats, floats)


def test_a_zero_point_of_0_needs_version_2_of_gptq():
    own = GridWeight.of(
        torch.zeros(8, 16, dtype=torch.uint8), torch.ones(8, 1), torch.zeros(8, 1, dtype=torch.int32), 16, 4
    )
    assert gptq_files.write({"a": own})[1]["checkpoint_format"] == "gptq_v2"


def test_layers_that_gptq_does_not_hold_together():
    own = [
        GridWeight.of(
            torch.zeros(8, 64, dtype=torch.uint8), torch.ones(8, n), torch.ones(8, n, dtype=torch.int32), 64 // n, 4
        )
        for n in (2, 4)
    ]
    with pytest.raises(
        ExportError, match=r"one width and block size for all layers, and a has 4 bits with blocks of 32, but b"
    ):
        gptq_files.write(dict(zip("ab", own, strict=True)))


def test_a_row_of_one_block_has_the_block_size_of_the_other_layers():
    """Alone, its group size would be -1, the whole row."""
    row, rows = (
        GridWeight.of(
            torch.zeros(8, 32 * n, dtype=torch.uint8), torch.ones(8, n), torch.ones(8, n, dtype=torch.int32), 32, 4
        )
        for n in (1, 2)
    )
    assert gptq_files.write({"a": row})[1]["group_size"] == -1
    assert gptq_files.write({"a": row, "b": rows})[1]["group_size"] == 32


def test_blocks_of_scale_0_are_zeros():
    zero = torch.tensor([[3, 9]])
    own = GridWeight.of(torch.arange(8, dtype=torch.uint8)[None], torch.tensor([[0.0, 0.5]]), zero, 4, 4)
    assert own.floats.tolist() == [[0, 0, 0, 0, -2.5, -2, -1.5, -1]]
    assert bool((own.grid.scale > 0).all())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"order": torch.arange(63, -1, -1, dtype=torch.int32) // 16}, "order of activations"),
        ({"bits": 3}, "have 3 bits; fxq reads 2, 4, 8"),
        ({"quant_method": "gptqq"}, "'gptqq'.*gptq"),
    ],
    ids=["order", "bits", "method"],
)
def test_what_is_not_read_is_said(change, message, tmp_path):
    order, config = change.pop("order", None), dict(change)
    path, _ = gptq_folder(tmp_path, order=order)
    data = json.loads((path / "config.json").read_text())
    data["quantization_config"] |= config
    (path / "config.json").write_text(json.dumps(data))
    with pytest.raises(FileError, match=message):
        open_checkpoint(path)["a.weight"]


def compressed_folder(path):
    q, scale, zero, floats = example(20, 64, 16, 4)
    tensors = {"a.weight_packed": words(q, 4), "a.weight_scale": scale, "a.weight_shape": torch.tensor([20, 64])}
    tensors["a.weight_zero_point"] = words(zero.t(), 4).t()
    return folder(path, tensors, compressed(4, 16, False)), floats


FOLDERS = {"gptq": gptq_folder, "awq": awq_folder, "compressed-tensors": compressed_folder}


@settings(max_examples=25, deadline=None)
@given(
    format=st.sampled_from([*FOLDERS]),
    at=st.integers(0, 3000),
    bits=st.integers(1, 255),
    cut=st.one_of(st.none(), st.integers(0, 2000)),
)
def test_damaged_files_are_errors_or_weights(format, at, bits, cut, tmp_path_factory):
    """Bytes of the header or of tensors that are changed, and files that end early."""
    path, _ = FOLDERS[format](tmp_path_factory.mktemp("m"))
    file = path / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[at % len(data)] ^= bits
    file.write_bytes(data if cut is None else data[: cut % len(data)])
    try:
        read = open_checkpoint(path)
        for name in read:
            weight = read[name]
            assert (weight.floats if isinstance(weight, GridWeight) else weight).numel() <= 64 * len(data)
    except fxq.FxqError:
        pass


PARTS = [
    *[("gptq", f"a.{part}") for part in ("qweight", "qzeros", "scales", "g_idx")],
    *[("awq", f"a.{part}") for part in ("qweight", "qzeros", "scales")],
    *[("compressed-tensors", f"a.weight_{part}") for part in ("packed", "scale", "shape", "zero_point")],
]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("format", "part"), PARTS, ids=map("-".join, PARTS))
def test_tensors_of_wrong_types_and_shapes_are_errors(format, part, tmp_path):
    """Each tensor as another type, without its last row, without its last axis, and empty."""
    path, _ = FOLDERS[format](tmp_path)
    tensors = load_file(path / "model.safetensors")
    own = tensors[part]
    converted = own.to(torch.int64 if own.is_floating_point() else torch.float32)
    for wrong in (converted, own[:-1], own.reshape(-1), own[..., None], own[:0], own.reshape(-1)[0]):
        if wrong.shape == own.shape and wrong.dtype == own.dtype:  # a vector is flat already
            continue
        save_file({**tensors, part: wrong.contiguous()}, path / "model.safetensors")
        with pytest.raises(FileError, match=r"cannot read 'a\.weight'"):
            open_checkpoint(path)["a.weight"]


@pytest.mark.parametrize("size", [[2**40, 64], [20, 2**40], [-1, 64], [20, 0], [2**62, 2**62]], ids=str)
def test_huge_shapes_of_compressed_tensors_take_no_memory(size, tmp_path):
    path, _ = compressed_folder(tmp_path)
    tensors = load_file(path / "model.safetensors")
    save_file({**tensors, "a.weight_shape": torch.tensor(size)}, path / "model.safetensors")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(FileError, match=r"cannot read 'a\.weight'"):
        open_checkpoint(path)["a.weight"]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 14  # KiB; the file has less than 2


HOSTILE = [
    ("awq", {"bits": "4"}), ("awq", {"bits": [4]}), ("awq", {"version": "gemv"}), ("awq", {"version": None}),
    ("compressed-tensors", {"config_groups": []}), ("compressed-tensors", {"config_groups": {"g": None}}),
    ("compressed-tensors", {"config_groups": {"g": {"weights": {"num_bits": [4]}}}}),
    ("compressed-tensors", {"config_groups": {"g": {"weights": {"num_bits": 2**40}}}}),
    ("compressed-tensors", {"format": ["pack-quantized"]}), ("compressed-tensors", {"format": "marlin-24"}),
    ("gptq", {"bits": "4"}), ("gptq", {"bits": True}),
]  # fmt: skip


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("format", "change"), HOSTILE, ids=str)
def test_settings_of_wrong_types_are_errors(format, change, tmp_path):
    path, _ = FOLDERS[format](tmp_path)
    data = json.loads((path / "config.json").read_text())
    data["quantization_config"] |= change
    (path / "config.json").write_text(json.dumps(data))
    with pytest.raises(FileError, match="cannot read"):
        open_checkpoint(path)["a.weight"]
