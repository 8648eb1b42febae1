"""The gallery: its page is written from its rows, every picture is small, and a tool that fails has its reason."""

import json

import torch
from torch import nn

from scripts.bench.accuracy_subjects import Subject
from scripts.bench.number import sqnr
from scripts.demo import gallery
from scripts.demo.gallery_subjects import EXHIBITS
from scripts.demo.sequence_subjects import Part
from scripts.docs import gallery_page

FOLDER = gallery_page.FOLDER
ROWS = json.loads((FOLDER / "gallery.json").read_text(encoding="utf-8"))


def test_the_page_is_written_from_the_rows():
    assert (FOLDER / "gallery.md").read_text(encoding="utf-8") == gallery_page.page(ROWS)
    assert list(ROWS) == [key for key in EXHIBITS if key in ROWS] and len(ROWS) > 0


def test_every_network_has_a_small_picture():
    pictures = {path.stem: path.stat().st_size for path in (FOLDER / "static" / "gallery").glob("*.png")}
    assert pictures.keys() == ROWS.keys() and sum(pictures.values()) < 2**20


def test_a_row_has_the_quality_and_a_failure_its_reason():
    torch.manual_seed(0)
    model, x = nn.Linear(8, 4).eval(), torch.randn(64, 8)
    part = Part(model, (x[:1],), [(x,)])
    subject = Subject("linear", [part], lambda calls: calls[0](x), lambda a, b: {"SQNR, dB": sqnr(a, b)})
    result, outputs = gallery.row(subject, "float", gallery.as_it_is, model(x))
    assert result["quality"] == {"SQNR, dB": None} and result["ms"] > 0 and result["bytes"] == 4 * 36
    assert torch.equal(outputs, model(x))

    def broken(part, is_transformer):
        raise ValueError("no such op\nmore")

    result, outputs = gallery.row(subject, "broken", broken, model(x))
    assert outputs is None and result == {"tool": "broken", "why": "ValueError: no such op"}
    rows = [
        {**result},
        {"tool": "float", "quality": {"a": 1.0}, "ms": 1.0, "bytes": 1e6, "seconds": 2.0, "backends": []},
    ]
    assert "| float | 1 | 1 | 1 |  |" in gallery_page.table(rows) and "broken" not in gallery_page.table(rows)
