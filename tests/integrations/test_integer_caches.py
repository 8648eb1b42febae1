"""Decoders of transformers whose key-value cache is stored as integers."""

import copy
from dataclasses import replace

import pytest
import torch

import fxq
from fxq.common.metrics import sqnr
from fxq.quant.quantized_rows import QuantizedRows
from tests.integrations.test_transformers import ALL_FLOAT, IDS, MASK, generated, generator
from tests.support.helpers import REFERENCE

transformers = pytest.importorskip("transformers")

pytestmark = [pytest.mark.filterwarnings("ignore:nothing runs on integers"), pytest.mark.any_cpu]

CACHE = fxq.QuantConfig(activation=None, weight=None, state=fxq.TensorSpec(per="row", range="dynamic"))
INT8_CACHE = REFERENCE.override("*", fxq.FLOAT).override(fxq.by_op("append"), CACHE)
BLOCKS = replace(CACHE, state=fxq.TensorSpec(bits=4, per=4, range="dynamic"))
INT4_CACHE = REFERENCE.override("*", fxq.FLOAT).override(fxq.by_op("append"), BLOCKS)
MODELS = {"Llama": ("Llama", INT8_CACHE), "Mistral": ("Mistral", INT8_CACHE), "4 bits": ("Llama", INT4_CACHE)}


@pytest.fixture(scope="module", params=MODELS)
def models(request):
    """A float model, and the model with an integer cache and all else in float; Mistral's cache is a sliding window."""
    name, recipe = MODELS[request.param]
    model = generator(name)
    return model, fxq.quantize(model, recipe)


def states(cache):
    return [state for layer in cache.layers for state in (layer.keys, layer.values)]


@pytest.mark.one_in(2)
def test_generation_follows_the_float_model(models):
    model, qmodel = models
    got, want = generated(qmodel), generated(model)
    is_packed = states(got.past_key_values)[0].packing is not None
    least = 18 if is_packed else 35  # 4 bits per block, or 8 bits per row of keys and values
    assert sqnr(torch.stack(want.logits[:4]), torch.stack(got.logits[:4])) > least
    assert all(isinstance(state, QuantizedRows) for state in states(got.past_key_values))
    assert got.past_key_values.get_seq_length() == want.past_key_values.get_seq_length()


def test_beam_search_reorders_the_cache(models):
    """Each beam's logits are those of its own tokens, run again without a cache."""
    _, qmodel = models
    beams = generated(qmodel, length=12, num_beams=3, output_scores=True)
    again = qmodel(beams.sequences, attention_mask=torch.cat([MASK, torch.ones(3, 12, dtype=torch.long)], 1))
    log_probs = again.logits.log_softmax(-1)[:, IDS.shape[1] - 1 : -1]
    sums = log_probs.gather(2, beams.sequences[:, IDS.shape[1] :, None]).sum((1, 2)) / 12
    assert torch.allclose(sums, beams.sequences_scores, rtol=0, atol=1e-4)


def test_a_cropped_and_a_copied_cache(models):
    """A cache that was cut back to 5 tokens continues as one of 5 tokens; a copy and its original do not meet."""
    model, qmodel = models
    if model.config.model_type == "mistral":
        pytest.skip("a sliding window cannot be cropped")
    ids, more = IDS[1:, 1:], torch.arange(3, 9).reshape(2, 3)
    with torch.no_grad():
        cache = qmodel(ids[:, :3], use_cache=True).past_key_values
        for i in (3, 4, 5):
            cache = qmodel(ids[:, i : i + 1], past_key_values=cache).past_key_values
        second_cache = copy.deepcopy(cache)
        cache.crop(-1)
        second_cache.crop(-1)
        results = [qmodel(more, past_key_values=past).logits for past in (cache, second_cache)]
        want = qmodel(torch.cat([ids[:, :5], more], 1)).logits[:, 5:]
    for got in results:
        assert torch.allclose(got, want, rtol=0, atol=1e-4)


def test_the_cache_is_not_copied_for_each_token():
    for recipe in (ALL_FLOAT, INT8_CACHE, INT4_CACHE):
        qmodel = fxq.quantize(generator("Llama", num_hidden_layers=1, max_position_embeddings=1024), recipe)
        cache, copied, memory = transformers.DynamicCache(config=qmodel.config), 0, None
        with torch.no_grad():
            for i in range(64):
                cache = qmodel(IDS[:1, i % 7 : i % 7 + 1], past_key_values=cache).past_key_values
                (keys, _) = states(cache)
                stored = keys.parts[0] if isinstance(keys, QuantizedRows) else keys
                copied += stored.shape[2] if stored.untyped_storage().data_ptr() != memory else 0
                memory = stored.untyped_storage().data_ptr()
        assert copied < 4 * 64
