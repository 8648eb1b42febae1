"""LoRA adapters beside integer layers: those of peft, and ones made by hand with the attributes of peft's layers."""

import pytest
import torch
from torch import nn

import fxq
from fxq.common.metrics import sqnr
from tests.support.machine import no_warnings

pytestmark = no_warnings

INT8 = fxq.Recipe.weight_only(backend="reference")


class Lora(nn.Module):
    """Linear layer with an adapter of low rank."""

    adapter_layer_names = ("lora_A", "lora_B")

    def __init__(self, base_layer, rank=4):
        super().__init__()
        self.base_layer = base_layer
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base_layer.in_features, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, base_layer.out_features, bias=False)})

    def forward(self, x):
        return self.base_layer(x) + 2.0 * self.lora_B["default"](self.lora_A["default"](x))


@pytest.mark.parametrize("recipe", [INT8, fxq.Recipe.static(backend="reference")], ids=["weights", "static"])
def test_adapters_stay_in_float(recipe):
    torch.manual_seed(0)
    model = nn.Sequential(Lora(nn.Linear(16, 32)), nn.ReLU(), nn.Linear(32, 8)).eval()
    x = torch.randn(8, 16)
    qmodel = fxq.quantize(model, recipe, data=[x], example_inputs=x)
    entries = {entry.path: entry.precision for entry in qmodel.ledger if entry.op == "linear"}
    assert entries["0.lora_A.default"] == entries["0.lora_B.default"] == "float"
    assert "float" not in (entries["0.base_layer"], entries["2"])
    assert sqnr(model(x).detach(), qmodel(x).detach()) > 25


def test_an_override_wins():
    model = nn.Sequential(Lora(nn.Linear(16, 32))).eval()
    qmodel = fxq.quantize(model, INT8.override("**.lora_B.**", INT8.config), example_inputs=torch.randn(8, 16))
    entries = {entry.path: entry.precision for entry in qmodel.ledger if entry.op == "linear"}
    assert entries["0.lora_A.default"] == "float" and entries["0.lora_B.default"] == "weight-only"


def test_models_of_peft():
    """With adapters beside the layers, and merged into them."""
    peft = pytest.importorskip("peft")
    from scripts.networks.generators import generator, prompt

    model = generator("Llama", num_hidden_layers=1)
    options = {"r": 4, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False, "task_type": "CAUSAL_LM"}
    adapted, inputs = peft.get_peft_model(model, peft.LoraConfig(**options)).eval(), prompt("Llama")
    qmodel = fxq.quantize(adapted, INT8)
    with torch.no_grad():
        want = adapted(**inputs).logits
        assert sqnr(want, qmodel(**inputs).logits) > 30
    assert isinstance(qmodel, type(model)) and qmodel.generate(**inputs, max_new_tokens=4).shape == (3, 11)
    (ledger,) = qmodel.programs.ledger.values()
    entries = {entry.path: entry.precision for entry in ledger if entry.op == "linear"}
    attention = "model.layers.0.self_attn"
    assert entries[f"{attention}.q_proj.base_layer"] == entries[f"{attention}.k_proj"] == "weight-only"
    assert entries[f"{attention}.q_proj.lora_A.default"] == entries[f"{attention}.v_proj.lora_B.default"] == "float"
    merged = fxq.quantize(adapted.merge_and_unload(), INT8)
    with torch.no_grad():
        assert sqnr(want, merged(**inputs).logits) > 30


def test_virtual_tokens_of_peft_are_refused():
    peft = pytest.importorskip("peft")
    from scripts.networks.generators import generator

    model = generator("Llama", num_hidden_layers=1)
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    with pytest.raises(fxq.InputError, match=r"virtual tokens.*get_base_model"):
        fxq.quantize(peft.get_peft_model(model, config).eval(), INT8)
