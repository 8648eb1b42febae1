"""Decoder layers of transformers that are quantized as parts, or by themselves, and change the cache that they get."""

import pytest
import torch

import fxq
from fxq.common.metrics import sqnr
from tests.integrations.test_transformers import generated, generator
from tests.support.helpers import REFERENCE

transformers = pytest.importorskip("transformers")

LATER = fxq.Recipe.weight_only(backend="reference", new_kinds="trace")
IDS = torch.arange(14).reshape(2, 7)


def test_layers_that_the_recipe_names_are_parts():
    """The layers change the cache in Python, so that the parts are the modules inside of them."""
    model = generator("Llama", num_hidden_layers=1)
    with pytest.warns(fxq.FxqWarning, match="in 5 parts"):
        q = fxq.quantize(model, REFERENCE.parts("model.layers.*"), data=[{"input_ids": IDS, "use_cache": True}])
    layers = ["q_proj", "k_proj", "v_proj", "o_proj"]
    assert list(q.parts) == [*(f"model.layers.0.self_attn.{name}" for name in layers), "model.layers.0.mlp"]
    caches = [transformers.DynamicCache(config=model.config) for _ in range(2)]
    with torch.no_grad():
        for ids in (IDS, IDS[:, :1], IDS[:, 1:2], IDS[:, 2:5]):
            want, got = (m(ids, cache=past, use_cache=True).logits for m, past in zip((model, q), caches, strict=True))
            assert sqnr(want, got) > 25  # 8 bits
    assert caches[0].get_seq_length() == caches[1].get_seq_length() == 12
    assert torch.equal(generated(model).sequences[:, :9], generated(q).sequences[:, :9])


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [LATER.override("*", fxq.FLOAT), LATER], ids=["float", "int8"])
@pytest.mark.filterwarnings("ignore:nothing runs on integers")
def test_a_layer_by_itself_runs_prompt_and_tokens(recipe):
    """The cache of the example stays as it is: empty."""
    model = generator("Llama", num_hidden_layers=1)
    layer, width, start = model.model.layers[0], model.config.hidden_size, 0

    def call(length, cache):
        random = torch.Generator().manual_seed(start)
        x, positions = torch.randn(2, length, width, generator=random), torch.arange(start, start + length)[None]
        embeddings = model.model.rotary_emb(x, positions)
        return {"hidden_states": x, "cache": cache, "use_cache": True, "position_embeddings": embeddings}

    caches = [transformers.DynamicCache(config=model.config) for _ in range(3)]
    q = fxq.quantize(layer, recipe, example_inputs=[call(5, caches[2])])
    assert caches[2].get_seq_length() == 0
    with torch.no_grad():
        for length in (5, 1, 1, 3):
            (want, got), start = (
                (m(**call(length, past)) for m, past in zip((layer, q), caches, strict=False)),
                start + length,
            )
            states = [(past.layers[0].keys, past.layers[0].values) for past in caches[:2]]
            for a, b in ((want, got), *zip(*states, strict=True)):
                assert sqnr(a, b) > (30 if recipe is LATER else 100)
    assert list(q.programs) == ["program_0", "program_1", "program_2"]
