"""Shell of a quantized model of transformers: numbers of parameters, calls of modules inside, changes of weights."""

import copy
import pickle

import pytest
import torch

import fxq
from fxq.common.metrics import sqnr

transformers = pytest.importorskip("transformers")

from scripts.networks.generators import generator  # noqa: E402

pytestmark = pytest.mark.any_cpu

INT8 = fxq.Recipe.weight_only(backend="reference")
IDS = torch.arange(6).reshape(1, 6)
CONFIG = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}


def bert():
    return transformers.BertForSequenceClassification(transformers.BertConfig(vocab_size=64, **CONFIG)).eval()


MODELS = {
    "tied GPT2": (lambda: generator("GPT2", n_layer=1), "transformer"),
    "T5": (lambda: generator("T5", num_layers=1, num_decoder_layers=1), "decoder"),
    "BERT": (bert, "bert"),
}


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=[pytest.mark.slow] if name == "T5" else []) for name in MODELS]
)
def pair(request):
    """Float model, quantized model, and the name of a model inside."""
    make, inner = MODELS[request.param]
    model = make()
    return model, fxq.quantize(model, INT8), inner


@pytest.mark.one_in(3)
@pytest.mark.parametrize("way", [lambda q, folder: q, lambda q, folder: copy.deepcopy(q), "pickle", "file"])
def test_numbers_of_parameters_are_those_of_the_float_model(pair, way, tmp_path):
    model, qmodel, inner = pair
    if way == "pickle":
        qmodel = pickle.loads(pickle.dumps(qmodel))
    elif way == "file":
        qmodel.save_pretrained(tmp_path)
        qmodel = fxq.load(tmp_path)
    else:
        qmodel = way(qmodel, tmp_path)
    for options in ({}, {"exclude_embeddings": True}):
        assert qmodel.num_parameters(**options) == model.num_parameters(**options) > 0
        assert getattr(qmodel, inner).num_parameters(**options) == getattr(model, inner).num_parameters(**options)
    assert qmodel.num_parameters(only_trainable=True) == 0
    assert model.num_parameters() < qmodel.get_memory_footprint() < 0.45 * model.get_memory_footprint()
    table = qmodel.get_input_embeddings()
    assert table.weight.shape == model.get_input_embeddings().weight.shape and table.weight.dtype is torch.float32
    for module in (qmodel, getattr(qmodel, inner)):
        assert module.dtype is torch.float32
    assert not any(parameter.requires_grad and parameter.numel() for parameter in qmodel.parameters())


def test_models_and_layers_inside_are_refused_by_themselves(pair):
    model, qmodel, inner = pair
    name = type(getattr(model, inner)).__name__
    assert isinstance(getattr(qmodel, inner), type(getattr(model, inner)))
    with pytest.raises(fxq.InputError, match=f"this {name} is inside a quantized model.*call the whole model"):
        getattr(qmodel, inner)(IDS)
    with pytest.raises(fxq.InputError, match=r"weight is read, but.*Call the whole model"):
        qmodel.get_input_embeddings()(IDS)
    if inner == "bert":
        alone = fxq.quantize(model.bert, INT8)
        with torch.no_grad():
            assert sqnr(model.bert(IDS)[0], alone(IDS)[0]) > 30


CHANGES = {
    "resize": lambda q: q.resize_token_embeddings(70),
    "embedding": lambda q: q.set_input_embeddings(torch.nn.Embedding(64, 16)),
    "init": lambda q: q.init_weights(),
    "submodule": lambda q: setattr(q, "lm_head", torch.nn.Linear(2, 2)),
    "layer of a list": lambda q: next(m for m in q.modules() if isinstance(m, torch.nn.ModuleList)).append(q),
    "weight": lambda q: setattr(q.get_input_embeddings(), "weight", torch.nn.Parameter(torch.zeros(64, 16))),
    "values": lambda q: q.get_input_embeddings().weight.data.zero_(),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("change", CHANGES)
def test_changes_of_weights_and_layers_are_refused(pair, change):
    qmodel = copy.deepcopy(pair[1])
    with pytest.raises(fxq.InputError, match=r"change the float model|Call the whole model"):
        CHANGES[change](qmodel)
    qmodel.tie_weights()
    assert type(qmodel.eval().to("cpu")) is type(pair[1])
