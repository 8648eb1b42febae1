"""The prices of this machine, for their owner: where they are, and how they are forgotten, exported and taken over."""

import json

import pytest
import torch
from torch import nn

import fxq
from fxq.cost import cache as costs
from fxq.cost import price_file as prices
from fxq.errors import InputError

ROUNDS = {"conv": [1.0, 2.0], "linear": [3.0]}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache directory of the test's own; prices are measured, not free."""
    monkeypatch.setenv("FXQ_CACHE", str(tmp_path / "cache" / "fxq"))
    return tmp_path / "cache"


def test_the_path_is_where_quantize_keeps_them(cache, monkeypatch):
    assert prices.path().parent == cache / "fxq" and not prices.path().exists()
    monkeypatch.setattr(costs, "machine_costs", lambda: costs.Costs(costs.machine_path()))
    monkeypatch.setattr(costs, "MAX_EXTRA_SECONDS", 0.0)
    fxq.quantize(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3)).eval(), data=[torch.randn(4, 6)])
    assert prices.path().exists() or fxq.doctor([]).auto == "reference"


def test_reset_forgets():
    prices.reset()
    costs.write_rounds(prices.path(), ROUNDS)
    prices.reset()
    assert costs.read_rounds(prices.path()) == {}


def test_what_is_exported_can_be_loaded(tmp_path):
    costs.write_rounds(prices.path(), ROUNDS)
    file = prices.export(tmp_path / "deep" / "prices.json")
    prices.reset()
    costs.write_rounds(prices.path(), {"conv": [9.0], "relu": [4.0]})
    assert prices.load(file) == 2
    assert costs.read_rounds(prices.path()) == {**ROUNDS, "relu": [4.0]}


def test_nothing_to_export(tmp_path):
    with pytest.raises(InputError, match="no prices to export"):
        prices.export(tmp_path / "prices.json")


def test_prices_of_another_machine_are_refused(tmp_path):
    costs.write_rounds(prices.path(), ROUNDS)
    file = prices.export(tmp_path / "prices.json")
    data = json.loads(file.read_text())
    data["machine"]["CPU"] = "another CPU"
    file.write_text(json.dumps(data))
    prices.reset()
    with pytest.raises(
        InputError, match=r"of another kind of machine: CPU is 'another CPU' there, .*recipe_as_decided"
    ):
        prices.load(file)
    assert not prices.path().exists()


@pytest.mark.parametrize("text", ["", "{", '{"machine": {}}', '{"machine": {}, "rounds": {"a": []}}'])
def test_what_holds_no_prices_is_refused(tmp_path, text):
    (tmp_path / "prices.json").write_text(text)
    with pytest.raises(InputError, match="cannot read prices from"):
        prices.load(tmp_path / "prices.json")


def test_files_that_cannot_be_read_or_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot read prices from"):
        prices.load(tmp_path / "missing.json")
    costs.write_rounds(prices.path(), ROUNDS)
    with pytest.raises(InputError, match="cannot write the prices to"):
        prices.export(tmp_path / "file" / "prices.json")


def test_the_doctor_shows_where_they_are():
    costs.write_rounds(prices.path(), ROUNDS)
    shown = fxq.doctor([]).machine["prices"]
    assert str(prices.path()) in shown and "2 measured" in shown
