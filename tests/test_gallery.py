"""The gallery: its page, its pictures, a tool that fails, files of models and of networks, and how results are read."""

import dataclasses
import itertools
import json
import math

import numpy as np
import onnx.parser
import pytest
import torch
from torch import nn

import fxq
from scripts.bench.accuracy_contenders import FilePart
from scripts.bench.accuracy_subjects import Subject
from scripts.bench.number import sqnr
from scripts.bench.rivals import onnx_session
from scripts.demo import gallery, gallery_ocr, gallery_sound, gallery_vision
from scripts.demo.gallery_subjects import EXHIBITS
from scripts.demo.sequence_subjects import Part
from scripts.docs import gallery_page

FOLDER = gallery_page.FOLDER
ROWS = json.loads((FOLDER / "gallery.json").read_text(encoding="utf-8"))


def test_the_page_is_written_from_the_rows():
    assert (FOLDER / "gallery.md").read_text(encoding="utf-8") == gallery_page.page(ROWS)
    assert list(ROWS) == [key for key in EXHIBITS if key in ROWS] and len(ROWS) > 0


def test_the_page_names_the_vector_extensions_of_a_row():
    saturating = {"CPU": "EPYC", "vectors": "AVX2", "VNNI": "no: 16-bit sums", "AMX": "no"}
    assert gallery_page.cpu(saturating) == "EPYC, AVX2 without VNNI"
    assert (
        gallery_page.cpu({**saturating, "vectors": "AVX512", "VNNI": "yes", "AMX": "yes"})
        == "EPYC, AVX512 with VNNI, AMX"
    )


def test_every_network_has_a_small_picture():
    pictures = {path.stem: path.stat().st_size for path in (FOLDER / "static" / "gallery").glob("*.png")}
    assert pictures.keys() == ROWS.keys() and sum(pictures.values()) < 2**20


@pytest.mark.parametrize("precisions", [["float32"], ["float32", "bfloat16"]], ids=len)
def test_tools_of_a_network(monkeypatch, precisions):
    """Of language models weights alone are quantized, to the numbers of bits that the exhibit has, and dynamically."""
    monkeypatch.setattr(gallery, "has_bfloat16", lambda: len(precisions) == 2)
    tools = ["fxq", *(f"NNCF, {precision}" for precision in precisions), "ONNX Runtime"]
    assert [*gallery.tools_for(EXHIBITS["voice"])][2:] == [f"int8, {tool}" for tool in tools]
    names = [*(f"int{bits}, {tool}" for bits in (8, 4) for tool in tools), "int8 dynamic, fxq"]
    assert [*gallery.tools_for(EXHIBITS["english"])] == ["float, PyTorch", "float, ONNX Runtime", *names]


def test_the_backend_of_a_network():
    torch.manual_seed(0)
    part = Part(nn.Linear(8, 4).eval(), (torch.randn(1, 8),), [(torch.randn(64, 8),)])
    exhibit = dataclasses.replace(EXHIBITS["voice"], backend="reference")
    assert gallery.tools_for(exhibit)["int8, fxq"](part, False).call.backend == "reference"


def test_a_row_has_the_quality_and_a_failure_its_reason():
    torch.manual_seed(0)
    model, x = nn.Linear(8, 4).eval(), torch.randn(64, 8)
    part = Part(model, (x[:1],), [(x,)])
    subject = Subject("linear", [part], lambda calls: calls[0](x), lambda a, b: {"SQNR, dB": sqnr(a, b)})
    result, outputs, calls = gallery.row(subject, "float", gallery.as_it_is, model(x))
    assert result["quality"] == {"SQNR, dB": None} and result["bytes"] == 4 * 36
    assert torch.equal(outputs, model(x)) and calls == [model]

    def broken(part, is_transformer):
        raise ValueError("no such op\nmore")

    result, outputs, calls = gallery.row(subject, "broken", broken, model(x))
    assert outputs is calls is None and result == {"tool": "broken", "why": "ValueError: no such op"}
    rows = [
        {**result},
        {"tool": "float", "quality": {"a": 1.0}, "ms": 1.0, "bytes": 1e6, "seconds": 2.0, "backends": []},
    ]
    assert "| float | 1 | 1 | 1 |  |" in gallery_page.table(rows) and "broken" not in gallery_page.table(rows)


def test_tools_are_timed_in_turns():
    x, order = torch.randn(1, 8), []
    subject = Subject("linear", [Part(nn.Identity(), (x,), [(x,)])], lambda calls: calls[0](x), lambda a, b: {})

    def tool(name):
        return lambda x: order.append(name) or torch.ones(999).sum()

    times = gallery.milliseconds(subject, {name: [tool(name)] for name in "ab"})
    assert [*times] == ["a", "b"] and 0 <= min(times.values()) < math.inf
    turns = [name for name, _ in itertools.groupby(order)]
    assert turns == ["a", "b"] * gallery.ROUNDS


@pytest.mark.slow
def test_a_model_of_a_file_is_compared_in_a_process_without_the_packages_of_networks(capfd):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).eval(), torch.randn(64, 8)
    subject = Subject("linear", [Part(model, (x[:1],), [(x,)])], lambda calls: calls[0](x), lambda a, b: {})
    qmodel = fxq.quantize(model, "static", data=[x], progress=False)
    assert gallery.same_in_file(subject, [qmodel])

    class Changed(nn.Module):
        """Computes something other than what it saves."""

        def save(self, path):
            qmodel.save(path)

        def forward(self, x):
            return qmodel(x) + 1e-3

    assert not gallery.same_in_file(subject, [Changed()])
    assert "linear: AssertionError" in capfd.readouterr().err


def test_a_file_of_an_old_opset_with_a_fixed_size_is_made_usable_for_other_tools(tmp_path):
    text = """<ir_version: 3, opset_import: ["": 9]>
    g (float[10, 2] x, float[2, 2] w) => (float[10, 2] y) <float[2, 2] w = {1, 2, 3, 4}>
    { h = MatMul(x, w)  y = Relu(h) }"""
    onnx.save(onnx.parser.parse_model(text), tmp_path / "m.onnx")
    x = torch.tensor([[1.0, -1.0], [0.0, 2.0], [1.0, 1.0]])
    content = FilePart(nn.Identity(), (x,), [(x,)], tmp_path / "m.onnx").file()
    model = onnx.load_from_string(content)
    assert model.opset_import[0].version == 13 and [value.name for value in model.graph.input] == ["input0"]
    assert len({node.name for node in model.graph.node}) == len(model.graph.node) == 2
    (y,) = onnx_session(content).run(None, {"input0": x.numpy()})
    assert np.array_equal(y, [[0.0, 0.0], [6.0, 8.0], [4.0, 6.0]])


def test_casts_of_constants_are_constants_in_a_file_for_other_tools(tmp_path):
    text = """<ir_version: 8, opset_import: ["": 13]>
    g (float[3, 2] x) => (float[3, 2] y) <int64[2] c = {3, 4}>
    { f = Cast <to = 1> (c)  y = Mul(x, f) }"""
    onnx.save(onnx.parser.parse_model(text), tmp_path / "m.onnx")
    x = torch.ones(3, 2)
    content = FilePart(nn.Identity(), (x,), [(x,)], tmp_path / "m.onnx").file()
    assert [node.op_type for node in onnx.load_from_string(content).graph.node] == ["Mul"]
    (y,) = onnx_session(content).run(None, {"input0": x.numpy()})
    assert np.array_equal(y, [[3.0, 4.0]] * 3)


def test_a_centre_with_its_size_and_offset_is_a_box():
    likely, size, offset = torch.zeros(1, 1, 8, 8), torch.zeros(1, 2, 8, 8), torch.zeros(1, 2, 8, 8)
    likely[0, 0, 2, 5] = 0.9
    size[0, :, 2, 5] = torch.tensor([2.0, 3.0]).log()  # height, width, in steps of 4 pixels
    offset[0, :, 2, 5] = torch.tensor([0.25, -0.25])
    ((boxes, scores, _),) = gallery_vision.centred((likely, size, offset))
    assert torch.allclose(boxes, torch.tensor([[15.0, 7.0, 27.0, 15.0]]), atol=1e-5) and scores.tolist() == [
        likely.max()
    ]


def test_weights_of_an_ncnn_file_are_read_in_order():
    torch.manual_seed(0)
    model, same = (gallery_vision.VideoEnlarger(width=4, depth=1, scale=2).eval() for _ in range(2))
    content = b""
    for layer in (*model.layers, model.last):
        content += b"mark" if isinstance(layer, nn.Conv2d) else b""
        for parameter in layer.parameters():
            parameter.data = parameter.data.half().float()
            content += parameter.detach().numpy().astype("<f2" if parameter.dim() == 4 else "<f4").tobytes()
    same.read(content)
    x = torch.rand(1, 3, 6, 5)
    assert torch.equal(same(x), model(x)) and same(x).shape == (1, 3, 12, 10)
    same.last.bias.data.zero_()
    for layer in same.layers:
        layer.weight.data.zero_()
    same.last.weight.data.zero_()
    assert torch.equal(same(x), x.repeat_interleave(2, 2).repeat_interleave(2, 3))


def test_matches_of_a_turned_picture_are_right_where_it_was_turned_to():
    """Vectors of 16 places, and those places in the second picture."""
    torch.manual_seed(0)
    names = nn.functional.normalize(torch.randn(16, 64), dim=1)
    first = torch.cartesian_prod(torch.arange(100, 220, 40), torch.arange(100, 220, 40))[:9].float()
    x, y = ((first + 0.5 - 160) * gallery_vision.SCALED).unbind(1)
    turned = torch.tensor(gallery_vision.TURNED)
    second = torch.stack([turned.cos() * x + turned.sin() * y, turned.cos() * y - turned.sin() * x], 1) + 160 - 0.5
    second[0] += 20  # wrong by more than 3 pixels

    def outputs(places):
        features, logits = torch.zeros(1, 64, 40, 40), torch.zeros(1, 65, 40, 40)
        logits[:, 64] = 10
        for (x, y), name in zip(places.round().long().tolist(), names, strict=False):
            features[0, :, max(0, y // 8 - 1) : y // 8 + 2, max(0, x // 8 - 1) : x // 8 + 2] = name[:, None, None]
            logits[0, y % 8 * 8 + x % 8, y // 8, x // 8] = 20
        return features, logits, torch.ones(1, 1, 40, 40)

    _, _, right = gallery_vision.matches((outputs(first), outputs(second)))
    assert len(right) == 9 and int(right.sum()) == 8


def test_an_island_of_letters_is_a_word_and_its_box_has_the_size_of_the_picture():
    regions = torch.zeros(1, 2, 40, 60)
    regions[0, 0, 10:20, 5:15] = regions[0, 0, 10:20, 19:30] = 0.9
    regions[0, 1, 14:16, 15:19] = 0.9  # links the letters
    regions[0, 0, 30:40, 40:50] = 0.6  # too faint
    ((boxes, scores, classes),) = gallery_ocr.words_found(regions)
    assert torch.allclose(scores, torch.tensor([0.9]), atol=1e-6) and classes.tolist() == [0]
    left, top, right, bottom = boxes[0].tolist()
    assert 0 <= left <= 10 and 0 <= top <= 20 and 58 <= right <= 80 and 38 <= bottom <= 60


def test_letters_of_a_row_are_read_without_repetitions():
    row = [0, 43, 43, 0, 43, 71, 0]
    logits = nn.functional.one_hot(torch.tensor([row]), len(gallery_ocr.LETTERS)).float()
    letters = gallery_ocr.LETTERS
    assert gallery_ocr.word_of(logits) == letters[43] * 2 + letters[71] and len(letters) == 97


def test_words_are_right_where_a_box_covers_them():
    view = gallery_ocr.View(torch.zeros(3, 8, 8), ["one", "two"], torch.tensor([[0.0, 0, 4, 4], [5.0, 0, 9, 4]]))
    boxes = torch.tensor([[0.0, 0, 5, 5], [20.0, 0, 24, 4]])
    assert gallery_ocr.words_right(view, gallery_ocr.Reading(torch.zeros(0), boxes, ["one", "two"])) == 1
    assert gallery_ocr.words_right(view, gallery_ocr.Reading(torch.zeros(0), boxes[:0], [])) == 0


def test_spectrograms_are_compared_after_they_are_aligned():
    """Of rows of one value: a repeated frame costs nothing, an equal shift of all values its size."""
    a = torch.tensor([[0.0, 4.0, 9.0]])
    assert gallery_sound.aligned_distance(a, a[:, [0, 1, 1, 2]]) == 0.0
    assert gallery_sound.aligned_distance(a, a + 1) == pytest.approx(1.0)  # float64, exact
