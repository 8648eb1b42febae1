"""Helpers of engine tests: a recipe that runs all ops on integers, and the kernels of regions."""

import fxq
from fxq.backends.engine import EngineKernel
from fxq.graph.query import submodule


def recipe(name):
    return fxq.Recipe.static(backend=name, optimize="coverage").with_min_sqnr(None)


def kernels(q):
    return [submodule(q, n) for n in q.graph.nodes if isinstance(submodule(q, n), EngineKernel)]
