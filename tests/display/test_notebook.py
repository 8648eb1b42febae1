"""HTML for notebooks: it is well-formed, and text of the model is escaped."""

import pickle
import re
from html.parser import HTMLParser

import pytest
import torch
from torch import nn

import fxq
from fxq.display.notebook import folded, html, text_html
from fxq.display.tables import Column, Table, bar, row, text
from fxq.graph.view import GraphView, NodeView
from fxq.ledger.ledger import Entry, Ledger
from fxq.picture import writing
from fxq.picture.diff import diff
from fxq.picture.writing import MAX_NOTEBOOK_BOXES
from fxq.pipeline.history import History, Snapshot
from fxq.recipe.pass_base import Stage
from fxq.rewriting.editor import Edit
from tests.support.helpers import REFERENCE
from tests.support.pictures import needs_dot

pytestmark = pytest.mark.any_cpu


X = torch.linspace(-1, 1, 2 * 3 * 8 * 8).reshape(2, 3, 8, 8)
EVIL = "<img src=x onerror=alert(1)>\"'</pre></script><script>alert(2)</script>&lt;"
VOID = ("meta", "br", "img")


class Page(HTMLParser):
    """Its tags, its text, and whether every tag is closed."""

    def __init__(self, source):
        super().__init__()
        self.open, self.tags, self.attributes, self.text = [], [], [], ""
        self.feed(source)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def chain(length, name="chain"):
    nodes = [
        NodeView(f"n{i}", "op", "relu", inputs=(f"n{i - 1}",) if i else (), text=f"n{i} = relu") for i in range(length)
    ]
    return GraphView(tuple(nodes), name)


def snapshot(graph, name="fuse"):
    return Snapshot(name, 0.01, (Edit("r", "", (), ()),), graph, Stage.FUSED)


@pytest.fixture
def no_dot(monkeypatch):
    monkeypatch.setenv("PATH", "")


@pytest.fixture(scope="module")
def qmodel():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Hardtanh(), nn.Flatten(), nn.Linear(288, 5)).eval()
    return fxq.quantize(model, REFERENCE.override("4", fxq.FLOAT), data=[X])


# ---- pieces


def test_a_table():
    columns = (
        Column("name"),
        Column("n", "right", look="int8"),
        Column("bar", extra=True),
        Column("why", give="fold"),
    )
    cells = row("a<b", text("1", "float"), bar(10, (0.5, "op")), text("one\ntwo", breaks=True))
    page = Page(html([Table(columns, [cells])]))
    assert page.tags.count("th") == page.tags.count("td") == 4
    assert page.text == "nameint8barwhy" + "a<b" + "1" + "█████" + "one\ntwo"
    styles = [value for name, value in page.attributes if name == "style"]
    assert any("background-color: #c8500a" in style for style in styles)
    assert any("color: #6f7780" in style for style in styles)


def test_what_folds_away():
    page = Page(folded("a < b", "<i>c</i>"))
    assert page.tags == ["details", "summary", "i"] and page.text == "a < bc"
    assert ("open", None) in Page(folded("a", "b", opened=True)).attributes


def test_no_colour_of_text_is_fixed_but_on_a_ground_of_its_own():
    """A notebook may be light or dark: text takes its colour, or brings its ground along."""
    page = Page(LEDGER._repr_html_())
    for name, value in page.attributes:
        if name == "style" and re.search(r"(^|; ?)color:(?!inherit)", value):
            assert "background-color:" in value


LEDGER = Ledger(
    (
        Entry(EVIL, EVIL, EVIL, "float", EVIL, EVIL, EVIL),
        Entry("b", EVIL, "conv2d", "int8"),
        Entry("c", "c", "d", "folded"),
    )
)


# ---- names are data


def test_names_of_the_model_are_text():
    node = NodeView(EVIL, "float", EVIL, (EVIL,), EVIL, text=EVIL, path=EVIL, reason=EVIL, made_by=EVIL)
    graph = GraphView((node,), EVIL)
    shots = Snapshot(EVIL, 0.1, (Edit(EVIL, EVIL, (), ()),), graph, Stage.TRACED)
    for shown in (LEDGER, History([shots], EVIL), shots, diff(GraphView((), EVIL), graph)):
        page = Page(shown._repr_html_())
        assert "<img src=x onerror=alert(1)>" in page.text
        assert not {"img", "script"} & set(page.tags)
        assert not [name for name, _ in page.attributes if name.startswith("on")]


def test_text_as_it_stands():
    page = Page(text_html(f"{EVIL}\nsecond\x1b[2J"))
    assert page.tags == ["pre"] and page.text.splitlines() == [EVIL, "second [2J"]


# ---- pictures


@needs_dot
def test_a_snapshot_and_a_diff_show_their_picture():
    before, after = snapshot(chain(3)), snapshot(chain(5, "after"), "lower")
    for shown, title in ((after, "after lower"), (diff(before, after), "chain → after")):
        page = Page(shown._repr_html_())
        assert page.tags.count("svg") == 1 and title in page.text
        assert "<?xml" not in shown._repr_html_() and "<!DOCTYPE" not in shown._repr_html_()
    assert "2 added" in Page(diff(before, after)._repr_html_()).text


def test_without_dot_they_show_their_text_and_say_why(no_dot):
    before, after = snapshot(chain(3)), snapshot(chain(5, "after"), "lower")
    for shown, wanted in ((after, "n4 = relu"), (diff(before, after), "n4")):
        page = Page(shown._repr_html_())
        assert "svg" not in page.tags and "Install it" in page.text and wanted in page.text


@pytest.mark.slow
def test_a_huge_graph_is_not_drawn(monkeypatch):
    def dot(picture, form):
        raise AssertionError("this would take minutes")

    monkeypatch.setattr(writing, "drawn", dot)
    huge = snapshot(chain(2000, "after"), "it's")
    page = Page(huge._repr_html_())
    assert 'history["it\'s"].render("it\'s.svg")' in page.text and "n1999 = relu" in page.text
    page = Page(diff(chain(1), huge)._repr_html_())
    assert 'diff.render("diff.svg")' in page.text and "1999 added" in page.text
    assert len(huge._repr_html_()) < 200_000
    with pytest.raises(AssertionError, match="minutes"):
        snapshot(chain(MAX_NOTEBOOK_BOXES))._repr_html_()


# ---- what fxq hands out


def test_a_quantized_model(qmodel):
    page = Page(qmodel._repr_html_())
    assert f"backend {qmodel.backend}" in page.text and f"{qmodel.ledger.coverage:.1%} of the multiply" in page.text
    assert "ops in float, and why" in page.text and "the recipe says float for '4'" in page.text
    for name in qmodel.history.names:
        assert name in page.text
    assert page.tags.count("details") == 3 and page.attributes.count(("open", None)) == 2  # all but the ledger
    assert "0.0% of the multiply" not in page.text  # of the float part
    assert len(qmodel._repr_html_()) < 50_000


def test_a_quantized_model_without_float_ops():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()).eval()
    page = Page(fxq.quantize(model, REFERENCE, data=[X])._repr_html_())
    assert "in float" not in page.text and page.tags.count("details") == 2


def test_a_copy_shows_the_same(qmodel):
    assert pickle.loads(pickle.dumps(qmodel))._repr_html_() == qmodel._repr_html_()


def test_an_observed_model():
    observed = fxq.prepare(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()).eval(), REFERENCE, example_inputs=X)
    observed(X)
    page = Page(observed._repr_html_())
    assert "1 batch" in page.text and "insert-observers" in page.text


def test_a_recipes_pipeline():
    page = Page(fxq.Recipe.static().pipeline._repr_html_())
    assert "fold-batch-norm" in page.text and "th" not in page.tags
