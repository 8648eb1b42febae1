"""The q/dq forms of kernels through a file: the same form, with the kernel's tensors."""

import copy
import warnings
from dataclasses import replace
from functools import cache

import pytest
import torch

import fxq
from fxq.graph.info import set_info
from fxq.graph.text.text_writer import same_graph
from fxq.saved.kernel_forms import attach_forms, write_forms
from fxq.saved.other_machine import kernels_of
from tests.support import models
from tests.support.helpers import filed
from tests.support.machine import needs_x86

COVERAGE = fxq.Recipe.static(optimize="coverage")


def quantized(name):
    """A copy of a network that is quantized once."""
    return copy.deepcopy(quantized_once(name))


@cache
def quantized_once(name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return fxq.quantize(models.build(name), COVERAGE, data=[models.batch(name)])


@pytest.mark.one_in(4)
@needs_x86
@pytest.mark.parametrize("name", ["residual", "prelu_chain", "squeeze_excite", "called_twice"])
def test_every_form_comes_back(name):
    qmodel = quantized(name)
    reloaded = filed(qmodel)
    pairs = list(zip(kernels_of(qmodel), kernels_of(reloaded), strict=True))
    assert any(kernel.form is not None for (_, kernel), _ in pairs)
    for (node, kernel), (_, loaded_kernel) in pairs:
        assert loaded_kernel.form.takes == kernel.form.takes, node
        assert same_graph(loaded_kernel.form.module(loaded_kernel), kernel.form.module(kernel)), node
    kernel, loaded_kernel = next((k, f) for (_, k), (_, f) in pairs if dict(k.named_buffers()))
    buffer, _ = next(iter(loaded_kernel.named_buffers()))
    loaded_kernel.get_buffer(buffer).zero_()  # the form has the kernel's tensor, not one of its own
    assert not same_graph(loaded_kernel.form.module(loaded_kernel), kernel.form.module(kernel))


@needs_x86
def test_a_unit_stands_there_once():
    text, stored, _ = write_forms(quantized("residual"))
    heads = [line.partition("(")[0] for line in text.splitlines() if line.startswith("def ")]
    assert len(heads) == len(set(heads)) and {f"def {name}" for name in stored} < set(heads)


@needs_x86
@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"kernel": "fxq_kernels.none"}, "which no node calls"),
        ({"takes": (7,)}, "takes other inputs than it is called with"),
        ({"parts": {"fxq_data.w": ("weight", 0, (3, 3, 3, 8))}}, "has the shape"),
        ({"parts": {"fxq_data.w": ("bias", 10**6, (3,))}}, "do not fit its form"),
        ({"parts": {"fxq_data.w": ("none", 0, (3,))}}, "do not fit its form"),
        ({"parts": {}}, "unknown tensor"),
    ],
)
def test_forms_of_another_kernel(change, why):
    qmodel = quantized("residual")
    text, stored, tensors = write_forms(qmodel)
    name = next(name for name, about in stored.items() if about.parts)
    with pytest.raises(fxq.InputError, match=why):
        attach_forms(qmodel, text, {**stored, name: replace(stored[name], **change)}, tensors)


@needs_x86
def test_graphs_that_are_missing():
    qmodel = quantized("residual")
    text, stored, tensors = write_forms(qmodel)
    with pytest.raises(fxq.InputError, match="expected the graphs form_0, "):
        attach_forms(qmodel, text, {**stored, "form_x": stored["form_0"]}, tensors)


@needs_x86
def test_a_form_for_other_values_than_the_kernel_gets():
    qmodel = quantized("residual")
    written = write_forms(qmodel)
    node = next(node for node, kernel in kernels_of(qmodel) if kernel.form is not None)
    set_info(node, dtype=torch.float64)
    with pytest.raises(fxq.InputError, match=rf"{node.name}: the form of '.*' is for .*, not for .*float64"):
        attach_forms(qmodel, *written)
