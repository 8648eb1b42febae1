"""Constants that depend on parameters are recorded if the recipe trains, and can be computed again."""

import torch
from torch import nn

import fxq
from fxq.recipe.pass_base import Stage
from fxq.rewriting.computed import parametrized_constant
from fxq.workflow.steps import manager_for, up_to
from tests.support.helpers import REFERENCE, module

X = torch.randn(2, 3)


def computed(model, recipe):
    """Trainable constants of a model's canonical graph, and that graph."""
    manager = manager_for(model.eval(), recipe, X)
    manager.run(up_to(manager.context.recipe, Stage.FUSED))
    return manager.context.computed, manager.gm


def scaled():
    """Weight that is the transpose of a parameter times a constant."""
    torch.manual_seed(0)
    model = module(lambda self, x: x @ (self.weight * self.factor), weight=nn.Parameter(torch.randn(3, 4)))
    model.register_buffer("factor", torch.tensor([2.0]))
    return model


def test_it_computes_the_constant_again():
    model = scaled()
    constants, gm = computed(model, fxq.Recipe.qat(backend="reference"))
    (product, times), (turned, transposed) = constants.items()
    assert (times.paths, transposed.paths) == (("weight",), (product,))
    own = {"weight": torch.randn(3, 4)}
    own[product] = times.value(own)
    torch.testing.assert_close(own[product], own["weight"] * 2)
    assert torch.equal(transposed.value(own), own[product].t())
    assert torch.equal(gm.get_buffer(turned), (model.weight * 2).t())
    assert times(own["weight"].requires_grad_()).requires_grad


def test_nothing_is_kept_where_nothing_is_trained():
    assert computed(scaled(), REFERENCE)[0] == {}


def test_what_is_computed_of_no_parameter_is_a_constant():
    model = module(lambda self, x: self.layer(x) + torch.arange(4).float().exp(), layer=nn.Linear(3, 4))
    assert computed(model, fxq.Recipe.qat(backend="reference"))[0] == {}


def test_parametrizations_with_and_without_a_state():
    normed, plain = nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)), nn.Linear(3, 4)
    constant = parametrized_constant(normed, "a.b", "weight")
    assert constant.paths == ("a.b.parametrizations.weight.original0", "a.b.parametrizations.weight.original1")
    g, v = torch.rand(4, 1), torch.randn(4, 3)
    torch.testing.assert_close(constant(g, v), g * v / v.norm(dim=1, keepdim=True))
    assert parametrized_constant(plain, "", "weight") is None
    assert parametrized_constant(nn.utils.parametrizations.spectral_norm(plain), "", "weight") is None
