"""Decoders of transformers as ONNX files with a cache that grows, run token by token in ONNX Runtime."""

import numpy as np
import pytest
import torch

import fxq
from fxq.errors import ExportError, InputError
from tests.integrations.test_transformers_checkpoints import IDS, llama

transformers = pytest.importorskip("transformers")
onnxruntime = pytest.importorskip("onnxruntime")
pytestmark = [pytest.mark.any_cpu, pytest.mark.filterwarnings("ignore::fxq.FxqWarning")]


@pytest.fixture(scope="module")
def decoder():
    return fxq.quantize(llama(), fxq.Recipe.weight_only(bits=4, per=32))


def continued(path, ids, count):
    """Tokens with `count` more by ONNX Runtime, each the likeliest one, and the logits of the prompt."""
    session = onnxruntime.InferenceSession(path)
    outputs = [value.name for value in session.get_outputs()]
    cache = {
        value.name: np.zeros((len(ids), value.shape[1], 0, value.shape[3]), np.float32)
        for value in session.get_inputs()
        if value.name.startswith("cache")
    }
    texts, new, first = ids.numpy(), ids.numpy(), None
    for _ in range(count):
        past, length = next(iter(cache.values())).shape[2], new.shape[1]
        tokens = {
            "input_ids": new,
            "attention_mask": np.ones((len(ids), past + length), np.int64),
            "position_ids": np.tile(np.arange(past, past + length), (len(ids), 1)),
        }
        results = dict(zip(outputs, session.run(None, tokens | cache), strict=True))
        cache = {name: results[f"new_{name}"] for name in cache}
        first = results["output_logits"] if first is None else first
        new = results["output_logits"][:, -1:].argmax(-1)
        texts = np.concatenate([texts, new], 1)
    return torch.from_numpy(texts), torch.from_numpy(first)


@pytest.mark.parametrize("form", [pytest.param(None, marks=pytest.mark.slow), "matmulnbits"])
def test_a_cache_that_grows(decoder, tmp_path, form):
    path = tmp_path / "decoder.onnx"
    program = decoder.programs.programs["decoder"]
    program.export(path, dynamic=decoder.dynamic_axes(), format=form)
    texts, logits = continued(path, IDS, 8)
    with torch.no_grad():
        expected = decoder(IDS).logits
    # in the standard form, ONNX Runtime rounds the inputs of 4-bit layers to 8 bits
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5 if form else 0.05)
    if form:
        assert torch.equal(texts, decoder.generate(IDS, max_new_tokens=8, do_sample=False, attention_mask=IDS > 0))


def test_the_mask_has_the_sum_of_two_sizes(decoder):
    axes = decoder.dynamic_axes()
    assert axes["attention_mask"] == {0: "batch", 1: "past + new"}
    assert axes["input_ids"] == axes["position_ids"] == {0: "batch", 1: "new"}
    assert axes["cache_layers_0_values"] == {0: "batch", 2: "past"}


def test_sizes_that_do_not_fit_together(decoder, tmp_path):
    program, axes = decoder.programs.programs["decoder"], decoder.dynamic_axes()
    for mask, why in (
        ({1: "past + old"}, "no axis has the size 'old' alone"),
        ({1: "new"}, "axis 1 of 'attention_mask' is 'new', which is 3 in the example, and has the size 8"),
    ):
        with pytest.raises(InputError, match=why):
            program.export(tmp_path / "m.onnx", dynamic={**axes, "attention_mask": mask})
    with pytest.raises(ExportError, match="needs a fixed size"):  # a mask of any length
        program.export(tmp_path / "m.onnx", dynamic={**axes, "attention_mask": {1: "length"}})


def test_a_decoder_with_other_states_is_quantized_in_parts():
    torch.manual_seed(0)
    config = transformers.MambaConfig(vocab_size=48, hidden_size=32, state_size=4, num_hidden_layers=1)
    model = transformers.MambaForCausalLM(config).eval()
    with pytest.raises(InputError, match="LinearAttentionLayer, whose states are not keys and values") as refused:
        fxq.quantize(model, "weight_only")
    assert '.parts("**.*_proj")' in str(refused.value)
    recipe = fxq.Recipe.weight_only().parts("**.*_proj")
    qmodel = fxq.quantize(model, recipe, example_inputs={"input_ids": IDS})
    options = {"max_new_tokens": 3, "do_sample": False, "attention_mask": torch.ones_like(IDS)}
    assert qmodel.generate(IDS, **options).shape == (2, 9)
