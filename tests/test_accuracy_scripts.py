"""Parts of the accuracy scripts: networks, data, the cascade, judgements, contenders; without extra packages."""

import json
import math
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import fxq

pytestmark = pytest.mark.any_cpu

ROOT = Path(__file__).resolve().parents[1]


def picture(width=80, height=60):
    """No two pixels alike."""
    values = np.arange(width * height * 3, dtype=np.uint32) % 251
    return Image.fromarray(values.astype(np.uint8).reshape(height, width, 3))


# ---- networks


@pytest.mark.parametrize(
    ("name", "side", "shapes"),
    [
        ("ProposalNet", 40, [(2, 4, 15, 15), (2, 2, 15, 15)]),
        ("RefinementNet", 24, [(2, 4), (2, 2)]),
        ("OutputNet", 48, [(2, 4), (2, 2), (2, 10)]),
    ],
)
def test_networks_for_faces_have_the_outputs_they_say(script, name, side, shapes):
    network = getattr(script("networks.trained"), name)().eval()
    with torch.no_grad():
        outputs = network(torch.randn(2, 3, side, side))
    assert [tuple(x.shape) for x in outputs] == shapes
    assert torch.allclose(outputs[1].sum(1), torch.ones_like(outputs[1].sum(1)), atol=1e-6)


def test_pitches_are_likely_to_some_degree(script):
    with torch.no_grad():
        outputs = script("networks.trained").Crepe().eval()(torch.randn(2, 1024))
    assert outputs.shape == (2, 360)
    assert 0 < outputs.min() < outputs.max() < 1


def test_layers_that_look_back_do_not_see_what_follows(script):
    torch.manual_seed(0)
    layer = script("networks.sequence").BertLayer(width=8, heads=2, inner=16, causal=True).eval()
    x = torch.randn(1, 5, 8)
    changed = torch.cat([x[:, :3], torch.randn(1, 2, 8)], 1)
    with torch.no_grad():
        a, b = layer(x), layer(changed)
    assert torch.equal(a[:, :3], b[:, :3])
    assert not torch.allclose(a[:, 3:], b[:, 3:])


# ---- data


def test_crops_are_the_same_for_the_same_seed(script):
    data = script("bench.accuracy_data")
    images = data.crops(picture(), 3, "a", side=16)
    assert images.shape == (3, 3, 16, 16)
    assert images.min() >= -127 / 128 and images.max() <= 1
    assert torch.equal(images, data.crops(picture(), 3, "a", side=16))
    assert torch.equal(images[:2], data.crops(picture(), 2, "a", side=16))
    assert not torch.equal(images, data.crops(picture(), 3, "b", side=16))


def test_crops_of_photographs_are_alike_many_of_each(script, monkeypatch):
    data = script("bench.accuracy_data")
    colours = {"dark": (7, 7, 7), "light": (207, 207, 207)}
    monkeypatch.setattr(data, "photograph", lambda name: Image.new("RGB", (40, 30), colours[name]))
    images = data.crops_of(["dark", "light"], 7, "seed")
    assert images.shape == (7, 3, 224, 224)
    assert sorted((images[:, 0, 0, 0] * 128 + 127).tolist()) == [7.0] * 4 + [207.0] * 3


def test_photographs_say_how_to_get_them(script, monkeypatch):
    data = script("bench.accuracy_data")
    monkeypatch.setattr(script("demo.sequence_data"), "find_spec", lambda name: None)
    with pytest.raises(script("demo.sequence_data").Missing, match=r"skimage is not installed: .*scikit-image=="):
        data.photograph("chelsea.png")
    assert data.photograph("china.jpg").size == (640, 427)


def test_tones_have_the_pitch_and_the_loudness_that_they_should(script):
    samples = script("bench.accuracy_data").tones(20, seed=3)
    assert samples.shape == (20, 1024)
    assert torch.allclose(samples.mean(1), torch.zeros(20), atol=1e-5)
    assert torch.allclose(samples.std(1), torch.ones(20), atol=1e-4)
    loudest = torch.fft.rfft(samples).abs().argmax(1) * 16_000 / 1024
    assert loudest.min() >= 40 and loudest.max() <= 8000
    assert torch.equal(samples, script("bench.accuracy_data").tones(20, seed=3))


# ---- the cascade


def test_boxes_overlap_by_what_they_share(script):
    faces = script("bench.accuracy_faces")
    a, b = torch.tensor([[0.0, 0, 4, 4]]), torch.tensor([[2.0, 0, 4, 4], [0, 0, 4, 4], [5, 5, 6, 6]])
    assert faces.overlap(a, b).tolist() == [[0.5, 1.0, 0.0]]
    assert faces.overlap(a, b, of_smaller=True).tolist() == [[1.0, 1.0, 0.0]]


def test_of_boxes_on_one_another_the_likeliest_stays(script):
    boxes = torch.tensor([[0.0, 0, 10, 10], [1, 0, 10, 10], [20, 20, 30, 30]])
    kept = script("bench.accuracy_faces").best(boxes, torch.tensor([0.8, 0.9, 0.7]), most=0.5)
    assert kept.tolist() == [1, 2]
    assert len(script("bench.accuracy_faces").best(boxes[:0], torch.zeros(0), most=0.5)) == 0


def test_a_box_is_in_one_pair_at_most(script):
    """The second of the wanted ones lies on the found one, too, but not as closely."""
    wanted, boxes = torch.tensor([[0.0, 0, 10, 10], [0, 0, 10, 8]]), torch.tensor([[0.0, 0, 10, 10]])
    subjects = script("bench.accuracy_subjects")
    assert script("bench.accuracy_faces").matched(wanted, boxes) == [1.0]
    numbers = subjects.same_faces([wanted, boxes], [boxes, torch.tensor([[50.0, 50, 60, 60]])])
    assert numbers == {"same faces": 1, "of": 3, "others": 1, "mean box IoU": 1.0}
    assert subjects.same_faces([boxes], [boxes[:0]])["mean box IoU"] == 0.0


@pytest.mark.parametrize("corner", [(0, 0), (40, 24)])
def test_the_cascade_finds_what_the_networks_take_for_a_face(script, corner):
    """Networks that take what is bright for a face: a white square of 40 pixels on black."""
    faces = script("bench.accuracy_faces")
    image, (left, top) = torch.zeros(3, 90, 120), corner
    image[:, top : top + 40, left : left + 40] = 255.0

    def proposal(x):
        means = torch.nn.functional.avg_pool2d(x.mean(1, keepdim=True), 12, 2)
        sure = (means + 1) / 2
        return torch.zeros(1, 4, *means.shape[2:]), torch.cat([1 - sure, sure], 1)

    def judged(x):
        sure = (x.mean((1, 2, 3))[:, None] + 1) / 2
        return torch.zeros(len(x), 4), torch.cat([1 - sure, sure], 1)

    boxes = faces.detect([proposal, judged, judged], image)
    square = torch.tensor([[left, top, left + 40.0, top + 40.0]])
    assert len(boxes)
    assert faces.overlap(boxes, square, of_smaller=True).min() > 0.6  # the least probability of a face is 0.7
    assert len(faces.detect([proposal, judged, judged], torch.zeros(3, 90, 120))) == 0


# ---- judgements


def test_agreement_has_its_standard_error(script):
    """3 of 4 the same: 100 · sqrt(0.75 · 0.25 / 4) points."""
    score = script("bench.accuracy_subjects").agreement(torch.eye(4), torch.eye(4)[[0, 1, 2, 0]])
    assert score["agreement, %"] == 75.0
    assert score["± points"] == pytest.approx(100 * math.sqrt(0.75 * 0.25 / 4))
    assert score["SQNR, dB"] == pytest.approx(10 * math.log10(4 / 2))


@pytest.mark.slow
def test_what_a_search_finds_beside_float_and_the_default(script):
    """On a network of four classes: the search keeps the target, and a row says what each takes of layers in float."""
    bench = script("bench.search")
    torch.manual_seed(0)
    layers = torch.nn.Conv2d(3, 16, 3), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten()
    model = torch.nn.Sequential(*layers, torch.nn.Linear(16, 4)).eval()
    data = torch.randn(64, 3, 8, 8).split(16)
    metric = bench.Agreement(model, torch.randn(60, 3, 8, 8))
    assert metric(model) == 100
    assert metric(lambda x: -model(x)) < 100
    result = fxq.search(model, "static", data, metric, target=0.0)
    assert result.reached and result.score == 100
    rows = {row[0]: row[1:] for row in bench.judged(model, result, data, torch.randn(50, 3, 8, 8), 0.1)}
    assert list(rows) == ["float", "default", "found"]
    assert rows["float"][0] == "3 of 3" and rows["default"][0] == "0 of 3"  # the pooling is one
    assert rows["found"][0] == f"{len(result.floats)} of 3"
    assert rows["float"][1] == "100.0 ± 0.0 %"


def test_sizes_that_differ_are_left_open(script):
    contenders = script("bench.accuracy_contenders")
    data = [(torch.zeros(2, 3, 8), torch.zeros(2, 5)), (torch.zeros(4, 3, 9), torch.zeros(4, 5))]
    assert contenders.open_sizes(data) == {"input0": {0: "size0", 2: "size2"}, "input1": {0: "size0"}}
    assert [row["input0"].shape for row in contenders.single(data)] == [(1, 3, 8)] * 2 + [(1, 3, 9)] * 4


def test_fxq_stands_with_each_observer_once(script):
    """But for its default, which is `fxq static`."""
    bench = script("bench.accuracy_contenders")
    others = {f"fxq {name}" for name in bench.OBSERVERS if name != fxq.Recipe.static().config.activation.observer}
    assert set(bench.contenders(observers=True)) - set(bench.contenders()) == others


def test_what_fails_has_its_reason_in_the_table(script):
    bench, subjects = script("bench.accuracy"), script("bench.accuracy_subjects")
    part = script("demo.sequence_subjects").Part(torch.nn.Identity(), (torch.eye(2),), [(torch.eye(2),)])
    subject = subjects.Subject("net", [part], lambda calls: calls[0](torch.eye(2)), subjects.agreement)

    def fails(part, is_transformer):
        raise ValueError("no such op\nand more")

    makes = {"halved": lambda part, is_transformer: (lambda x: x / 2, "half"), "broken": fails}
    rows = list(bench.measured(subject, makes))
    assert [row.contender for row in rows] == ["float", "halved", "broken"]
    assert rows[1].numbers["SQNR, dB"] == pytest.approx(10 * math.log10(4))
    assert rows[2].note == "ValueError: no such op"
    assert "ValueError: no such op" in bench.table("net", rows).splitlines()[-1]
    assert bench.as_data(rows[0])["SQNR, dB"] is None  # JSON has no infinity
    assert json.loads(json.dumps(bench.as_data(rows[1])))["note"] == "half"


@pytest.mark.slow
def test_texts_are_cut_into_pieces_that_share_nothing(script):
    text = script("demo.accuracy_text")
    assert text.numbered("Ab é") == [0, 1, text.CHARACTERS.index(" "), text.OTHER]
    train, judged = text.pieces(100)
    assert train.shape[1] == judged.shape[1] == text.LENGTH + 1
    assert len(train) > 5 * len(judged) > 0
    assert not {tuple(row) for row in train.tolist()} & {tuple(row) for row in judged.tolist()}


# ---- runs


@pytest.mark.slow
def test_bench_accuracy_measures_the_digits_network(tmp_path):
    path = tmp_path / "numbers.json"
    command = [sys.executable, "-m", "scripts.bench.accuracy", "--only", "digits", "--json", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    rows = {row["contender"]: row for row in json.loads(path.read_text())["tables"]["digits"]}
    assert rows["float"]["accuracy, %"] > 99
    assert rows["fxq static"]["SQNR, dB"] > 35
    if find_spec("onnxruntime") and find_spec("onnx"):
        assert rows["ONNX Runtime, min-max"]["SQNR, dB"] > 25
    assert "CPU: " in done.stdout


@pytest.mark.slow
def test_demo_accuracy_writes_reports_and_pictures(tmp_path):
    command = [sys.executable, "-m", "scripts.demo.accuracy", "--quick", "--only", "resolution"]
    done = subprocess.run([*command, "--out", str(tmp_path)], capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "PSNR, dB" in done.stdout
    assert (tmp_path / "resolution" / "report.html").stat().st_size > 500
    assert (tmp_path / "resolution" / "picture.png").stat().st_size > 500
