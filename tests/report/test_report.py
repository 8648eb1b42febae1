"""The data of the report page against the history, the ledger and the integers; what cannot be shown, and refusals."""

import copy
import json
import math
import pickle
import re

import pytest
import torch
from torch import nn

import fxq
from fxq.errors import InputError, RenderError
from fxq.report.report import report_data, write_page
from tests.support.helpers import REFERENCE, module
from tests.support.models import batch, build

pytestmark = [pytest.mark.any_cpu, pytest.mark.usefixtures("one_round")]


def written(path):
    """The data in a report."""
    text = path.read_text(encoding="utf-8")
    return json.loads(re.search(r'id="fxq-data">(.*?)</script>', text, re.DOTALL).group(1))


# ---- history


def test_losses_are_there_where_they_were_measured(data):
    assert not any("sqnr" in p for p in data["passes"])
    checked = fxq.quantize(build("residual"), REFERENCE.with_check("numeric"), data=[batch("residual")])
    sqnrs = [p["sqnr"] for p in report_data(checked)["passes"]]
    assert sqnrs[0] == "inf"
    assert sqnrs[-1] == pytest.approx(checked.history[-1].sqnr, rel=1e-4)


# ---- quality


def test_the_ledger_is_there(qmodel, data):
    assert data["ledger"]["coverage"] == qmodel.ledger.coverage
    assert [row["name"] for row in data["ledger"]["rows"]] == [entry.name for entry in qmodel.ledger]
    assert [row["sqnr"] for row in data["ledger"]["rows"]] == [entry.sqnr for entry in qmodel.ledger]


def test_noise_of_each_layer_alone_is_there(qmodel, data):
    assert [row["own_sqnr"] for row in data["ledger"]["rows"]] == [entry.own_sqnr for entry in qmodel.ledger]
    assert any(row["own_sqnr"] for row in data["ledger"]["rows"])


# ---- time and size


def test_time_of_the_nodes_and_sizes_are_there(model, qmodel, data):
    time = data["time"]
    assert time["float_us"] > 0 and time["int8_us"] > 0 and time["why"] == ""
    assert [op["name"] for op in time["ops"]] == [n.name for n in qmodel.graph.nodes if n.op.startswith("call")]
    assert {op["kind"] for op in time["ops"]} >= {"int8", "convert"}
    assert "float32[4, 3, 8, 8]" in time["batch"]
    assert data["size"] == {"float_bytes": fxq.results.nbytes(model), "int8_bytes": fxq.results.nbytes(qmodel)}


def test_without_the_float_model_its_time_is_missing_and_its_size_is_not(qmodel, data):
    page_data = report_data(copy.deepcopy(qmodel))
    assert page_data["time"]["float_us"] is None
    assert "the float model was deleted" in page_data["time"]["why"]
    assert page_data["size"] == data["size"]


def test_example_inputs_are_what_is_timed(qmodel, tmp_path):
    page_data = written(qmodel.report(tmp_path / "r.html", example_inputs=batch("residual", 2)))
    assert "float32[2, 3, 8, 8]" in page_data["time"]["batch"]


def test_inputs_that_cannot_be_made_up_are_not_timed():
    model = module(lambda self, inputs: self.layer(inputs[1]), layer=nn.Linear(4, 4))
    page_data = report_data(fxq.quantize(model, REFERENCE, data=[({1: torch.rand(2, 4)},)]))
    assert "input 0 is not a tensor" in page_data["time"]["why"]
    assert (page_data["time"]["int8_us"], page_data["time"]["ops"]) == (None, [])


# ---- comparisons


@pytest.fixture(scope="module")
def comparison(model, qmodel):
    return fxq.compare(model, qmodel, [batch("residual", seed=seed) for seed in (2, 3)])


def test_numbers_of_a_comparison_replace_those_of_the_ledger(qmodel, data, comparison, tmp_path):
    page_data = written(qmodel.report(tmp_path / "r.html", comparison=comparison))
    wanted = {row.name: row for row in comparison}
    rows = {row["name"]: row for row in page_data["ledger"]["rows"]}
    assert {name for name, row in rows.items() if row["sqnr"] is not None} == wanted.keys() != set()
    for name, row in wanted.items():
        numbers = [rows[name][key] for key in ("sqnr", "own_sqnr", "cosine", "max_error")]
        assert numbers == [row.sqnr, row.own_sqnr, row.cosine, row.max_error]
    assert (data["measured"], page_data["measured"]) == ("recorded calibration samples", "2 batches")
    assert page_data["values"] == json.loads(json.dumps(data["values"]))


def test_a_comparison_with_the_float_model_reports_the_model(qmodel, comparison, tmp_path):
    path = comparison.report(tmp_path / "new" / "c.html")
    assert path == tmp_path / "new" / "c.html"
    page_data = written(path)
    assert (page_data["kind"], page_data["measured"]) == ("model", "2 batches")
    assert [p["name"] for p in page_data["passes"]] == qmodel.history.names


def test_two_quantized_models_stand_side_by_side(model, qmodel, tmp_path):
    second_qmodel = fxq.quantize(model, REFERENCE.override("head", fxq.FLOAT), data=[batch("residual")])
    compared = fxq.compare(qmodel, second_qmodel, [batch("residual")])
    page_data = written(compared.report(tmp_path / "c.html"))
    assert (page_data["kind"], page_data["measured"]) == ("compare", "1 batch")
    assert page_data["title"] == "Residual: a (static on reference) against b (static on reference)"
    graphs = {p["name"]: [page_data["nodes"][i]["name"] for i in p["nodes"]] for p in page_data["passes"]}
    assert list(graphs) == ["traced", "a", "b"]
    assert graphs["traced"] == [node.name for node in qmodel.history[0].graph]
    assert graphs["a"] == [node.name for node in qmodel.history[-1].graph]
    assert graphs["b"] == [node.name for node in second_qmodel.history[-1].graph]
    plain = [{key: "inf" if value == math.inf else value for key, value in vars(row).items()} for row in compared]
    assert page_data["rows"] == plain
    assert page_data["output_sqnr"] == compared.output_sqnr
    a, b = page_data["sides"]
    assert a["recipe"] == REFERENCE.to_toml() != b["recipe"]
    assert [row["precision"] for row in b["ledger"]["rows"]] == [entry.precision for entry in second_qmodel.ledger]


def test_a_comparison_of_something_else_is_refused(model, qmodel, comparison, tmp_path):
    second_qmodel = fxq.quantize(model, REFERENCE, data=[batch("residual")])
    with pytest.raises(InputError, match="the comparison is of another model"):
        second_qmodel.report(tmp_path / "r.html", comparison=comparison)
    pair = fxq.compare(qmodel, second_qmodel, [batch("residual")])
    with pytest.raises(InputError, match=r"of two quantized models; .* fxq\.compare\(float_model, qmodel, data\)"):
        second_qmodel.report(tmp_path / "r.html", comparison=pair)
    with pytest.raises(InputError, match=r"comparison is a list; give what fxq\.compare returned"):
        second_qmodel.report(tmp_path / "r.html", comparison=[1])
    with pytest.raises(InputError, match="named by a str or a path"):
        pair.report(3)


# ---- the file


def test_the_file_holds_the_data_and_folders_are_made(qmodel, data, tmp_path):
    path = qmodel.report(tmp_path / "new" / "folder" / "report.html")
    assert path == tmp_path / "new" / "folder" / "report.html"
    page_data = written(path)
    assert page_data.keys() == data.keys()
    assert page_data["nodes"] == json.loads(json.dumps(data["nodes"]))
    assert page_data["version"] == 1 and page_data["kind"] == "model"


def test_what_made_the_model_is_there(data):
    assert data["backend"] == "reference"
    assert data["title"] == "Residual, static on reference"
    assert fxq.Recipe.from_dict(_toml(data["recipe"])) == REFERENCE


def _toml(text):
    from fxq.recipe.recipe_file import tomllib

    return tomllib.loads(text)


def test_a_recipe_that_no_file_holds_is_said():
    recipe = REFERENCE.fix_args(flag=None)
    model = module(lambda self, x, flag=None: self.layer(x), layer=nn.Linear(4, 4))
    page_data = report_data(fxq.quantize(model, recipe, data=[torch.rand(2, 4)]))
    assert page_data["recipe"].startswith("# This recipe has no TOML: ")


EVIL = "<img src=x onerror=alert(1)></script><script>alert(2)"


def test_names_are_data(tmp_path):
    model = nn.Sequential()
    model.add_module(EVIL, nn.Linear(4, 4))
    model.add_module("naïve 層", nn.ReLU())
    path = fxq.quantize(model.eval(), REFERENCE, data=[torch.rand(2, 4)]).report(tmp_path / "r.html")
    assert "<img" not in path.read_text(encoding="utf-8")
    assert {EVIL, "naïve 層"} <= {node.get("path") for node in written(path)["nodes"]}


def test_a_file_name_that_is_no_text_can_be_written(tmp_path):
    path = write_page({"title": "t", "source": "caf\udce9.py:3"}, tmp_path / "r.html")  # as Python decodes latin-1
    assert written(path)["source"] == "caf\udce9.py:3"


@pytest.mark.parametrize("remake", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_reports_the_same(qmodel, data, remake):
    page_data = report_data(remake(qmodel))
    assert {key for key in data if page_data[key] != data[key]} == {"time"}


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("forward", "inputs"),
    [
        (lambda self, x: {"y": self.layer(x), "n": 3}, (torch.rand(2, 4),)),
        (lambda self, x: (self.layer(x), x), (torch.rand(2, 4),)),
        (lambda self, x, *rest: self.layer(x) + rest[0], (torch.rand(2, 4), torch.rand(4))),
    ],
    ids=["dict", "pair", "star"],
)
def test_models_of_any_form_have_a_report(forward, inputs, tmp_path):
    qmodel = fxq.quantize(module(forward, layer=nn.Linear(4, 4)), REFERENCE, data=[inputs])
    assert len(written(qmodel.report(tmp_path / "r.html"))["passes"]) == len(qmodel.history)


def test_a_model_that_stays_in_float_has_a_report(tmp_path):
    with pytest.warns(fxq.FxqWarning, match="nothing runs on integers"):
        qmodel = fxq.quantize(nn.Sequential(nn.Softmax(1)).eval(), REFERENCE, data=[torch.rand(2, 4)])
    about = written(qmodel.report(tmp_path / "r.html"))
    assert (about["weights"], about["ledger"]["coverage"]) == ({}, 0.0)


# ---- refusals


@pytest.mark.parametrize("path", [None, 3, b"r.html"])
def test_what_is_no_path_is_refused(qmodel, path):
    with pytest.raises(InputError, match="named by a str or a path"):
        qmodel.report(path)


def test_a_file_that_cannot_be_written_is_said(qmodel, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RenderError, match=r"cannot write .*file"):
        qmodel.report(tmp_path / "file" / "r.html")
    with pytest.raises(RenderError, match="cannot write"):
        qmodel.report(tmp_path)
    for name in ("a\0b", "\ud800"):
        with pytest.raises(RenderError, match="cannot write"):
            qmodel.report(tmp_path / name)


def test_wrong_example_inputs_are_refused(qmodel, tmp_path):
    with pytest.raises(InputError, match="example_inputs: str is not a batch"):
        qmodel.report(tmp_path / "r.html", example_inputs="x")
    with pytest.raises(InputError, match=r"the model does not run on \(float32\[2, 5\]\)"):
        qmodel.report(tmp_path / "r.html", example_inputs=torch.rand(2, 5))
    assert not list(tmp_path.iterdir())
