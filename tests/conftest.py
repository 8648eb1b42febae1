"""Fixtures and hooks for all tests, and reports that several test files open in a browser."""

import gc
import importlib
import os
import random
from collections import Counter

import pytest
import torch
from hypothesis import settings

import fxq
from fxq.backends.loops.code import compiler
from fxq.common import timed_calls
from fxq.cost import cache as costs
from fxq.cost import probe
from fxq.graph.info import info
from scripts.networks import demo, resnet
from tests.support.browser import chromium
from tests.support.helpers import REFERENCE

# Order of summation, and so the tests' numbers, must not depend on the machine. And small tensors are slower on several
# threads, much slower where other programs run.
torch.set_num_threads(1)

# `scripts/test` draws fewer examples than the 100 of Hypothesis, where a test does not say how many.
settings.register_profile("ci", parent=settings.get_profile("ci"), max_examples=40)

gc.disable()  # until the tests are collected: what is imported stays

os.environ["TERM"] = (
    "dumb"  # what is printed is plain, also under `pytest -s` in a terminal; tests of colours set theirs
)


def pytest_pycollect_makemodule():
    """Random numbers that a module of tests draws for itself do not depend on which others are run."""
    torch.default_generator.manual_seed(0)  # no accelerator's: collecting the tests needs none


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Of a test with the mark `one_in(n)`, one of each n parametrizations is always run, the others with the slow ones.

    Which one is drawn, since with every n-th a list of n values in a product would always give the same value. Of the
    first n it is the first, so that a single one can be asked for by its id.
    """
    seen = Counter()
    for item in items:
        if mark := item.get_closest_marker("one_in"):
            test = item.nodeid.partition("[")[0]
            block, position = divmod(seen[test], mark.args[0])
            if position != (random.Random(block).randrange(mark.args[0]) if block else 0):
                item.add_marker(pytest.mark.slow)
            seen[test] += 1
    items.sort(key=lambda item: item.get_closest_marker("last") is not None)


def pytest_collection_finish():
    """Imported modules live until the end: freezing them spares the garbage collector repeated scans.

    And graphs have many short-lived objects: with Python's thresholds, the collector would run all the time.
    """
    gc.collect()
    gc.freeze()
    gc.enable()
    gc.set_threshold(10_000, 10, 5)


@pytest.fixture(autouse=True)
def seeded():
    """Nor do those of a test."""
    torch.manual_seed(int(os.environ.get("SEED_", "0")))


@pytest.fixture(autouse=True, scope="session")
def absent_accelerators_are_not_seeded():
    """Where there is no accelerator, each `torch.manual_seed` would store the formatted stack for later errors."""
    with pytest.MonkeyPatch.context() as patch:
        for device in (torch.cuda, torch.xpu, torch.mtia):
            if not device.is_available():
                patch.setattr(device, "manual_seed_all", lambda seed: None)
        yield


@pytest.fixture
def script():
    """Imports a script by its name below `scripts`."""
    return lambda name: importlib.import_module(f"scripts.{name}")


class IntegersAreFree(costs.Costs):
    """Prices at which everything that can runs on integers, so that no test depends on how fast the machine is.

    Tests of prices plant their own.
    """

    has_table = False

    def __contains__(self, key):
        return True

    def seconds(self, key, prepare, cold=False):
        return 1.0 if key.startswith("float") else 0.0


@pytest.fixture(autouse=True, scope="session")
def integers_are_free():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(costs, "machine_costs", IntegersAreFree)
        yield


@pytest.fixture(autouse=True, scope="session")
def times_are_short():
    """No test depends on how exact a time is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timed_calls, "MAX_ROUNDS", 3)
        yield


@pytest.fixture
def plant(monkeypatch):
    """Plants prices: `plant(price)` with a function from what is measured to microseconds."""

    def plant(price):
        class Planted(costs.Costs):
            has_table = False

            def __contains__(self, key):
                return True

            def seconds(self, key, prepare, cold=False):
                return 1e-6 * price(key)

        monkeypatch.setattr(costs, "machine_costs", Planted)

    return plant


@pytest.fixture
def plant_table(monkeypatch):
    """Plants a price table: `plant_table(price)` with a function from what is priced to microseconds.

    That is "float" or "int8" and the names and weight shapes of a region's ops, or the name of a conversion.
    """

    def plant_table(price):
        def named(form, region):
            weights = [str(list(info(n).shape or ())) for n in region.node.all_input_nodes]
            return " ".join([form, *(call.op.name for call in region.calls), *weights])

        class Table:
            def float_seconds(self, gm, region):
                return 1e-6 * price(named("float", region))

            def kernel_seconds(self, gm, region):
                return 1e-6 * price(named("int8", region))

            def conversion(self, kind, elements):
                return 1e-6 * price(kind)

        monkeypatch.setattr(probe, "table_for", lambda backend: Table())
        monkeypatch.setattr(costs, "machine_costs", costs.Costs)

    return plant_table


# ---- reports


@pytest.fixture(scope="session")
def browser():
    with chromium() as chromium_browser:
        yield chromium_browser


@pytest.fixture(scope="session")
def networks():
    """Modules of the demo's networks and of ResNets, in `scripts`."""
    return demo, resnet


@pytest.fixture(scope="session")
def digits(networks, tmp_path_factory):
    """The demo's classifier, one of its layers in float: the quantized model and its report."""
    _, model = networks[0].load_demo_networks()
    recipe = REFERENCE.override("block2.conv2", fxq.FLOAT)
    return _reported(model, recipe, torch.rand(8, 1, 8, 8), tmp_path_factory.mktemp("digits"))


@pytest.fixture(scope="session")
def resnet50(networks, tmp_path_factory):
    """A large network: the quantized model and its report."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model, batch = networks[1].resnet50().eval(), torch.randn(2, 3, 32, 32)
    return _reported(model, REFERENCE, batch, tmp_path_factory.mktemp("resnet50"))


def _reported(model, recipe, batch, folder):
    qmodel = fxq.quantize(model, recipe, data=[batch])
    return qmodel, qmodel.report(folder / "report.html")


@pytest.fixture(params=["compiled", "ops"])
def loops(request, monkeypatch):
    """Once with the loops that Numba compiles, and once without Numba."""
    if request.param == "compiled":
        pytest.importorskip("numba")
    else:
        monkeypatch.setattr(compiler, "loops", lambda name: None)
