"""Weights in GGUF files, against blocks that are decoded value by value, and damaged files."""

import resource
import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fxq
from fxq.checkpoints.gguf_files import GgufFile
from fxq.checkpoints.grid_weight import GridWeight
from fxq.errors import ExportError, FileError
from tests.support.gguf_writer import decoded, random_blocks, write_gguf

pytestmark = pytest.mark.any_cpu

WITH_ZERO_POINTS = {2: "Q4_0", 8: "Q8_0", 14: "Q6_K"}
WITH_OFFSETS = {3: "Q4_1", 12: "Q4_K"}
ABOUT = {"general.architecture": "llama", "llama.block_count": 1, "tokens": ["a", "bc", ""]}


def written(path, kind, rows=3, columns=512):
    stored = random_blocks(kind, rows, columns)
    wanted = torch.tensor([decoded(kind, row) for row in stored], dtype=torch.float64)
    tensors = {
        "bias": (0, (4,), np.arange(4, dtype=np.float32).tobytes()),
        "w": (kind, (rows, columns), stored.tobytes()),
    }
    return write_gguf(path, ABOUT, tensors), wanted


@pytest.mark.parametrize("kind", WITH_ZERO_POINTS, ids=WITH_ZERO_POINTS.get)
def test_types_with_integer_zero_points_are_exact(kind, tmp_path):
    path, wanted = written(tmp_path / "m.gguf", kind)
    weight = GgufFile(path)["w"]
    assert not weight.grid.zero_point.is_floating_point()
    scales = weight.grid.scale.repeat_interleave(weight.grid.block, 1)
    zeros = weight.grid.zero_point.repeat_interleave(weight.grid.block, 1)
    assert torch.equal((weight.integers.double() - zeros) * scales.double(), wanted)


@pytest.mark.parametrize("kind", WITH_OFFSETS, ids=WITH_OFFSETS.get)
def test_types_with_offsets_are_exact_up_to_rounding(kind, tmp_path):
    path, wanted = written(tmp_path / "m.gguf", kind)
    weight = GgufFile(path)["w"]
    reach = wanted.reshape(-1, 32).abs().amax(1).repeat_interleave(32).reshape(wanted.shape)
    assert bool(((weight.floats.double() - wanted).abs() <= 4e-7 * reach).all())  # three roundings in float32
    with pytest.raises(ExportError, match="between integers"):
        weight.unsigned()


def test_a_block_of_scale_0_holds_its_offset(tmp_path):
    stored = random_blocks(3, 1, 64)
    stored[0, 0:2] = 0  # scale of the first block
    stored[0, 20:24] = 0  # scale and offset of the second block
    path = write_gguf(tmp_path / "m.gguf", ABOUT, {"w": (3, (1, 64), stored.tobytes())})
    wanted = torch.tensor([decoded(3, stored[0])])
    assert torch.equal(GgufFile(path)["w"].floats, wanted) and len(wanted.unique()) == 2


def test_floats_and_metadata(tmp_path):
    path, _ = written(tmp_path / "m.gguf", 2)
    file = GgufFile(path)
    assert file["bias"].tolist() == [0, 1, 2, 3]
    assert file.metadata["llama.block_count"] == 1 and file.metadata["tokens"] is None


def replaced(path, old, new):
    data = path.read_bytes()
    assert data.count(old) >= 1
    path.write_bytes(data.replace(old, new, 1))
    return path


HUGE = 2**60
ENTRY = struct.pack("<Q", 1) + b"w" + struct.pack("<I", 2)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (struct.pack("<QQ", 3, 1) + b"a", struct.pack("<QQ", HUGE, 1) + b"a", "an array of"),
        (ENTRY + struct.pack("<Q", 512), ENTRY + struct.pack("<Q", 2**62), "do not lie within the file"),
        (ENTRY + struct.pack("<QQ", 512, 3), ENTRY + struct.pack("<QQ", 512, HUGE), "do not lie within the file"),
        (struct.pack("<QQIQ", 512, 3, 2, 32), struct.pack("<QQIQ", 512, 3, 2, HUGE), "do not lie within the file"),
        (struct.pack("<QQIQ", 512, 3, 2, 32), struct.pack("<QQIQ", 512, 3, 99, 32), "has the type 99; fxq reads F32"),
        (struct.pack("<QQIQ", 512, 3, 2, 32), struct.pack("<QQIQ", 500, 3, 2, 32), "no multiple of blocks of 32"),
        (b"GGUF" + struct.pack("<IQ", 3, 2), b"GGUF" + struct.pack("<IQ", 3, HUGE), "tensors, more than it has bytes"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2, 3), b"GGUF" + struct.pack("<IQQ", 3, 2, HUGE), "metadata|ends within"),
        (b"GGUF" + struct.pack("<I", 3), b"GGUF" + struct.pack("<I", 9), "version 9"),
    ],
    ids=["array", "columns", "rows", "offset", "type", "blocks", "tensors", "entries", "version"],
)  # fmt: skip
def test_hostile_headers_are_errors(old, new, message, tmp_path):
    path = replaced(written(tmp_path / "m.gguf", 2)[0], old, new)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(FileError, match=message):
        GgufFile(path)["w"]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 14  # KiB; the file has less than 2


@pytest.mark.parametrize("size", [0, 3, 10, 40, 150])
def test_files_that_end_within_their_header(size, tmp_path):
    path, _ = written(tmp_path / "m.gguf", 2)
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(FileError, match=r"cannot read .*m\.gguf"):
        GgufFile(path)


@settings(max_examples=33, deadline=None)
@given(
    kind=st.sampled_from([*WITH_ZERO_POINTS, *WITH_OFFSETS]),
    changes=st.lists(st.tuples(st.integers(0, 1500), st.integers(0, 255)), max_size=4),
    size=st.one_of(st.none(), st.integers(0, 1500)),
)
def test_damaged_files_are_errors_or_weights(kind, changes, size, tmp_path_factory):
    path, _ = written(tmp_path_factory.mktemp("m") / "m.gguf", kind, 1, 256)
    data = bytearray(path.read_bytes())
    for at, byte in changes:
        data[at % len(data)] = byte
    path.write_bytes(data[:size])
    try:
        file = GgufFile(path)
        for name in file:
            weight = file[name]
            assert (weight.floats if isinstance(weight, GridWeight) else weight).numel() <= 2 * len(data)
    except fxq.FxqError:
        pass
