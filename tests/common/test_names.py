"""Which names of modules torch.fx can write into code, asked of Python and of torch.fx."""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import fx, nn

from fxq.common.names import check_names, is_writable
from fxq.errors import InputError

pytestmark = pytest.mark.any_cpu


@given(st.text(st.sampled_from("ab1_-. \"'\\\n\r\0é"), min_size=1, max_size=6).filter(lambda n: "." not in n))
@example("class")
@example("None")
@example("0")
@example("a b")
def test_a_name_is_writable_where_the_code_of_a_graph_finds_the_module(name):
    root = nn.Module()
    root._modules[name] = nn.ReLU()
    graph = fx.Graph()
    graph.output(graph.create_node("call_module", name, (graph.placeholder("x"),)))
    try:
        runs = torch.equal(fx.GraphModule(root, graph)(torch.tensor([-1.0])), torch.zeros(1))
    except Exception:  # whatever Python makes of the code
        runs = False
    assert runs or not is_writable(name)


@pytest.mark.parametrize("path", ["conv1", "layers.0.fc", "a-b", "with space"])
def test_ordinary_paths_are_writable(path):
    assert is_writable(path)


@pytest.mark.parametrize("path", ["a.class.b", 'say "hi"', "back\\slash", "two\nlines", "lambda"])
def test_what_breaks_code_is_not(path):
    assert not is_writable(path)


@pytest.mark.parametrize("name", ["graph", "recompile", "code", "meta"])
def test_a_module_by_the_name_of_what_a_graph_module_has_is_refused(name):
    model = nn.Module()
    model._modules[name] = nn.ReLU()
    with pytest.raises(InputError, match=f"called '{name}', a name that torch.fx or fxq needs"):
        check_names(model, fx.GraphModule)


def test_other_names_go_through():
    check_names(nn.ModuleDict({"conv": nn.Conv2d(1, 1, 1), "graphs": nn.ReLU()}), fx.GraphModule)
