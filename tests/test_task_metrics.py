"""Metrics of tasks: values of hand-made outputs, and their use in a search."""

import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import fxq
from fxq import task_metrics


class Returns(nn.Module):
    """Model that returns one of its fixed outputs for each input, by its number."""

    def __init__(self, outputs):
        super().__init__()
        self.outputs = outputs

    def forward(self, x):
        return self.outputs[int(x)]


def numbers(count):
    return [torch.tensor(float(i)) for i in range(count)]


def test_top_class_and_cosine():
    right = Returns([torch.tensor([[1.0, 2.0], [3.0, 0.0]]), torch.tensor([[0.0, 1.0]])])
    wrong = Returns([torch.tensor([[1.0, 2.0], [0.0, 3.0]]), torch.tensor([[1.0, 0.0]])])
    metric = task_metrics.top_class(right, numbers(2))
    assert metric(right) == 1 and metric(wrong) == pytest.approx(1 / 3)
    metric = task_metrics.cosine(right, numbers(2))
    assert metric(right) == pytest.approx(1) and metric(wrong) == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("a", "b", "edits"),
    [("", "", 0), ("kitten", "sitting", 3), ("abc", "", 3), ("flaw", "lawn", 2), ("same", "same", 0)],
)
def test_edit_distance(a, b, edits):
    assert task_metrics.edit_distance(a, b) == task_metrics.edit_distance(b, a) == edits


@given(st.text("ab", max_size=6), st.text("ab", max_size=6), st.text("ab", max_size=6))
def test_edit_distance_is_a_distance(a, b, c):
    assert task_metrics.edit_distance(a, c) <= task_metrics.edit_distance(a, b) + task_metrics.edit_distance(b, c)
    assert (task_metrics.edit_distance(a, b) == 0) == (a == b)


def letters(output):
    return ["".join("abc"[int(i)] for i in row) for row in output]


def test_text():
    right, wrong = Returns([torch.tensor([[0, 1, 2], [1, 1, 1]])]), Returns([torch.tensor([[0, 2, 2], [1, 1, 1]])])
    metric = task_metrics.text(right, numbers(1), letters)
    assert metric(right) == 1 and metric(wrong) == pytest.approx(5 / 6)


def detections(*rows):
    """One image: rows of (x1, y1, x2, y2, score, class)."""
    table = torch.tensor(rows, dtype=torch.float32).reshape(-1, 6)
    return [(table[:, :4], table[:, 4], table[:, 5].int())]


def same(output):
    return output


def test_boxes():
    truth = Returns([detections((0, 0, 10, 10, 0.9, 0), (20, 20, 30, 30, 0.8, 0), (0, 0, 5, 5, 0.7, 1))])
    metric = task_metrics.boxes(truth, numbers(1), same)
    assert metric(truth) == pytest.approx(1)
    # Of class 0 the first is found, a false box has a higher score than the second: precision 1, then 2/3.
    shifted = Returns([detections((1, 0, 11, 10, 0.9, 0), (50, 50, 60, 60, 0.85, 0), (20, 20, 30, 30, 0.8, 0))])
    assert metric(shifted) == pytest.approx((0.5 * 1 + 0.5 * 2 / 3 + 0) / 2)
    assert metric(Returns([detections()])) == 0
    # A box that is found twice counts once.
    twice = Returns([detections((0, 0, 10, 10, 0.9, 0), (0, 0, 10, 10, 0.8, 0), (0, 0, 5, 5, 0.7, 1))])
    assert metric(twice) == pytest.approx((0.5 + 1) / 2)
    with pytest.raises(fxq.InputError, match="the float model detects no box"):
        task_metrics.boxes(Returns([detections()]), numbers(1), same)


def test_boxes_below_the_least_score_are_neither_to_be_found_nor_false():
    box, unsure = (0, 0, 10, 10, 0.9, 0), (20, 20, 30, 30, 0.2, 0)
    truth = Returns([detections(box, unsure, (0, 0, 5, 5, 0.2, 1))])
    metric = task_metrics.boxes(truth, numbers(1), same, least=0.25)
    assert metric(truth) == 1
    assert metric(Returns([detections(box)])) == 1
    # The box is found with a low score; before it comes one that the float model is unsure of, or one that it lacks.
    assert metric(Returns([detections((0, 0, 10, 10, 0.1, 0), (20, 20, 30, 30, 0.95, 0))])) == 1
    assert metric(Returns([detections((0, 0, 10, 10, 0.1, 0), (50, 50, 60, 60, 0.95, 0))])) == 0.5
    with pytest.raises(fxq.InputError, match="the float model detects no box"):
        task_metrics.boxes(Returns([detections(unsure)]), numbers(1), same, least=0.25)


def test_log_mel():
    time = torch.arange(16000) / 16000
    sound = torch.sin(2 * torch.pi * 440 * time)[None]
    right, louder = Returns([sound]), Returns([sound * 2])
    metric = task_metrics.log_mel(right, numbers(1), 16000)
    assert metric(right) == 0
    filters = task_metrics._mel_filters(16000, 80, 1024)
    assert filters.shape == (80, 513) and float(filters.max()) <= 1
    assert -6.1 < metric(louder) < -3  # 6.02 dB in each band that is above the floor
    spectrum = task_metrics.spectrogram(sound, 16000, 80)[0].mean(-1)
    mel = 2595 * torch.log10(torch.tensor(1 + 440 / 700))
    assert int(spectrum.argmax()) == pytest.approx(
        float(mel / (2595 * torch.log10(torch.tensor(1 + 8000 / 700))) * 81), abs=2
    )


def test_a_model_without_floats():
    with pytest.raises(fxq.InputError, match="returns no floating-point tensor"):
        task_metrics.top_class(Returns([torch.tensor([1])]), numbers(1))(Returns([torch.tensor([1])]))


def test_search_with_a_metric_that_other_processes_can_read():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 5)).eval()
    data = [torch.randn(64, 8) for _ in range(2)]
    metric = task_metrics.top_class(model, data)
    assert pickle.loads(pickle.dumps(metric))(model) == 1
    result = fxq.search(model, "static", data, metric, target=0.05)
    assert result.reached
    assert metric(fxq.quantize(model, result.recipe, data=data)) >= 0.95


def test_decoders_that_do_not_return_one_entry_for_each_input():
    lost = Returns([torch.tensor([1.0]), torch.tensor([2.0])])
    metric = task_metrics.text(lost, numbers(1), lambda output: ["a"] * int(output))
    assert metric(lost) == 1
    with pytest.raises(fxq.InputError, match=r"decode returned 2 entries instead of 1"):
        metric(Returns([torch.tensor([2.0])]))
    with pytest.raises(fxq.InputError, match=r"decode returned a single text"):
        task_metrics.text(lost, numbers(1), lambda output: "abc")(lost)


def test_images_without_detections():
    """An image without boxes counts its false boxes; its tensors may have lost their axis of 4."""
    box = (torch.tensor([[0.0, 0.0, 2.0, 2.0]]), torch.tensor([0.9]), torch.tensor([1]))
    for nothing in (
        (torch.zeros(0), torch.zeros(0), torch.zeros(0)),
        (torch.zeros(0, 4), torch.zeros(0), torch.zeros(0)),
    ):
        metric = task_metrics.boxes(Returns([[nothing, box]]), numbers(1), lambda output: output)
        assert metric(Returns([[nothing, box]])) == 1
        assert metric(Returns([[box, box]])) == 0.5
        assert metric(Returns([[nothing, nothing]])) == 0


def test_a_comparison_has_the_metric_of_both_models():
    torch.manual_seed(0)
    model, data = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).eval(), [torch.randn(64, 8)]
    four = fxq.TensorSpec(bits=3, signed=True, symmetric=True, per="channel", observer="minmax")
    qmodel = fxq.quantize(model, fxq.Recipe.static(weight=four, backend="reference"), data=data)
    metric = task_metrics.top_class(model, data)
    table = fxq.compare(model, qmodel, data, metric)
    assert table.metric == (1.0, metric(qmodel)) and 0 < table.metric[1] < 1
    assert f"metric {table.metric[1]:.4g} instead of 1; " in str(table) and '"metric"' in table.to_json()
    assert fxq.compare(qmodel, qmodel, data, metric).metric == (table.metric[1], table.metric[1])
    assert fxq.compare(model, qmodel, data).metric is None
    for wrong, message in ((0.5, "metric is 0.5; give a function"), (lambda _: "good", "the metric returned 'good'")):
        with pytest.raises(fxq.InputError, match=message):
            fxq.compare(model, qmodel, data, wrong)
