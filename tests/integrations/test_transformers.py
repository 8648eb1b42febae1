"""Decoders of transformers: `generate` of the quantized model, beside the float model's."""

import copy
import itertools
import pickle
from types import SimpleNamespace

import pytest
import torch

import fxq
from fxq.common.metrics import sqnr

transformers = pytest.importorskip("transformers")

from scripts.coverage.generators import compare  # noqa: E402
from scripts.networks.generators import CASES, ENCODER_DECODERS, generator, prompt, vision_language  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:nothing runs on integers"),
    pytest.mark.filterwarnings("ignore:with integer weights"),
    pytest.mark.any_cpu,
]

ALL_FLOAT = fxq.Recipe.weight_only(backend="reference").override("*", fxq.FLOAT)
INT8 = fxq.Recipe.weight_only(backend="reference")
FAST = [("Llama", "sdpa"), ("Mistral", "eager"), ("T5", "sdpa")]

IDS, MASK = prompt("Llama").values()


def cases(fast):
    """All families, of which all but some are slow."""
    return [pytest.param(*case, marks=[] if case in fast else pytest.mark.slow) for case in CASES]


def generated(model, ids=IDS, mask=MASK, length=32, **options):
    options = {"do_sample": False, "output_logits": True, "return_dict_in_generate": True, **options}
    return model.generate(ids, attention_mask=mask, max_new_tokens=length, **options)


def steps(model, inputs, **options):
    """Tokens and logits of 32 greedy steps."""
    options = {"do_sample": False, "output_logits": True, "return_dict_in_generate": True, **options}
    return model.generate(**inputs, max_new_tokens=32, **options)


@pytest.mark.parametrize(("family", "attention"), cases(FAST[2:]))
def test_a_graph_in_float_generates_what_the_model_does(family, attention):
    """Prompt with padding, 32 tokens with a cache, and beam search."""
    model, inputs = generator(family, attention), prompt(family)
    qmodel = fxq.quantize(model, ALL_FLOAT)
    names = ["decoder", "first"] if family in ENCODER_DECODERS else ["decoder"]
    assert isinstance(qmodel, type(model)) and list(qmodel.programs.programs) == names
    want, got = steps(model, inputs), steps(qmodel, inputs)
    assert torch.equal(want.sequences, got.sequences)
    assert sqnr(torch.stack(want.logits), torch.stack(got.logits)) > 80
    tokens = {"decoder_input_ids": IDS[:, :4]} if family in ENCODER_DECODERS else {}
    with torch.no_grad():
        logits = [network(**inputs, **tokens).logits for network in (model, qmodel)]
    if not tokens:  # OPT itself gives padding the position -1, generate() 0, as the graph does
        logits = [values[inputs["attention_mask"].bool()] for values in logits]
    assert sqnr(*logits) > 80
    beams = [m.generate(**inputs, max_new_tokens=8, num_beams=2, do_sample=False) for m in (model, qmodel)]
    assert torch.equal(*beams)


@pytest.mark.parametrize(("family", "attention"), cases(FAST[:1]))
def test_integer_weights_follow_the_model(family, attention):
    model, inputs = generator(family, attention), prompt(family)
    qmodel = fxq.quantize(model, INT8)
    assert all(program.ledger.count("weight-only") for program in qmodel.programs.programs.values())
    want, got = steps(model, inputs), steps(qmodel, inputs)
    comparison = compare(want, got)
    assert comparison.sqnr_db > 30 and comparison.margin < 4  # units of the rounding noise


def test_other_tokens_need_a_margin_under_the_noise():
    """Three steps of two sequences, of which the second has another token at its second step, and other logits then."""

    def result(logits):
        tokens = torch.cat([torch.zeros(1, 2, dtype=torch.long), logits.argmax(-1)]).T
        return SimpleNamespace(logits=tuple(logits), sequences=tokens)

    random = torch.Generator().manual_seed(0)
    wanted = torch.randn(3, 2, 50, generator=random)
    wanted[1, 1, :2] = torch.tensor([5.0, 4.9])
    wanted[2, :, 7] = wanted[0, :, 7] = wanted[1, 0, 7] = 6.0
    error = 0.05 * torch.randn(3, 2, 50, generator=random)
    error[1, 1, :2] = torch.tensor([-0.1, 0.1])
    got = wanted + error
    got[2, 1] = torch.randn(50, generator=random)
    near = compare(result(wanted), result(got))
    assert near.steps == 1 and near.sqnr_db > 25
    assert near.margin == pytest.approx(0.1 / (0.05 * 2**0.5), rel=0.2)
    got[1, 1, 7] = 9.0  # a wrong token, far from the two largest
    wanted[1, 1, :2] = torch.tensor([5.0, 2.0])
    assert compare(result(wanted), result(got)).margin > 4
    assert (
        compare(result(wanted), result(wanted)).steps == compare(result(wanted[:2]), result(wanted[:2])).steps + 1 == 3
    )


@pytest.mark.slow
def test_images_in_the_prompt_have_a_program():
    """A program for each number of images, which beam search multiplies by the number of beams."""
    model, call = vision_language(layers=1)
    beams = {name: tensor.repeat_interleave(2, 0) for name, tensor in call.items()}
    qmodel = fxq.quantize(model, ALL_FLOAT, example_inputs={"image": call, "beams": beams})
    assert list(qmodel.programs.programs) == ["decoder", "image", "beams"]
    options = {"max_new_tokens": 8, "do_sample": False}
    for count in (1, 2):
        want, got = (
            generating_model.generate(**call, **options, num_beams=count) for generating_model in (model, qmodel)
        )
        assert torch.equal(want, got)
    with pytest.raises(fxq.InputError, match="the graph was traced with inputs for which"):
        qmodel.generate(**call, **options, num_beams=3)
    with torch.no_grad():
        assert sqnr(model(IDS).logits, qmodel(IDS).logits) > 80


@pytest.fixture(scope="module")
def llama():
    model = generator("Llama", num_hidden_layers=1)
    return model, fxq.quantize(model, INT8)


@pytest.mark.slow
def test_every_way_to_generate_works(llama):
    model, _ = llama
    qmodel = fxq.quantize(model, ALL_FLOAT)
    ways = (
        {"do_sample": True, "top_k": 10},
        {"num_beams": 3, "num_return_sequences": 2},
        {"repetition_penalty": 1.5},
        {"use_cache": False},
    )
    for options in ways:
        results = []
        for each_model in (model, qmodel):
            torch.manual_seed(1)
            results.append(generated(each_model, length=6, **options).sequences)
        assert torch.equal(*results), options
    single = {"ids": IDS[:1], "mask": None, "length": 8}
    for options in ({"prompt_lookup_num_tokens": 3}, {"assistant_model": model}):
        assert torch.equal(generated(model, **single).sequences, generated(qmodel, **single, **options).sequences)


def test_a_call_is_that_of_the_float_model(llama):
    model, qmodel = llama
    with torch.no_grad():
        assert sqnr(model(IDS).logits, qmodel(IDS).logits) > 30
        assert sqnr(model(IDS, logits_to_keep=2).logits, qmodel(IDS, logits_to_keep=2).logits) > 30
        assert qmodel(IDS, use_cache=False).past_key_values is None
        logits, cache = qmodel(input_ids=IDS, return_dict=False, output_attentions=False)
        assert torch.equal(logits, qmodel(IDS).logits) and cache.get_seq_length() == 7
        step = qmodel(IDS[:, :1], past_key_values=cache)
        assert step.past_key_values is cache and cache.get_seq_length() == 8
    assert qmodel.dtype is torch.float32 and qmodel.device.type == "cpu" and qmodel.config is not model.config
    assert qmodel.main_input_name == "input_ids" and isinstance(qmodel, transformers.PreTrainedModel)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.int32])
def test_masks_may_have_any_dtype(llama, dtype):
    with torch.no_grad():
        want, got = (llama[1](IDS, attention_mask=mask).logits for mask in (MASK, MASK.to(dtype)))
    assert torch.equal(want, got)


def test_caches_are_returned_or_refused(llama):
    model, qmodel = llama
    with torch.no_grad():
        for network in llama:
            cache = transformers.DynamicCache(config=model.config)
            assert network(IDS, past_key_values=cache, use_cache=False).past_key_values is cache
        longer = copy.deepcopy(cache)
        longer.layers.append(copy.deepcopy(longer.layers[0]))
        with pytest.raises(fxq.InputError, match="the cache has 2 layers, and the model has 1"):
            qmodel(IDS, past_key_values=longer)
        with pytest.raises(fxq.InputError, match="the cache is a tuple"):
            qmodel(IDS, past_key_values=((torch.zeros(2, 2, 1, 8),) * 2,) * 2)


@pytest.mark.parametrize(
    "way", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"]
)
def test_copies_generate_the_same(llama, way):
    _, qmodel = llama
    again = way(qmodel)
    assert type(again) is type(qmodel)
    assert torch.equal(generated(again, length=5).sequences, generated(qmodel, length=5).sequences)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_of_16_bits_are_quantized(dtype):
    model = generator("Llama", num_hidden_layers=1).to(dtype)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    qmodel = fxq.quantize(model, INT8)
    assert qmodel.programs.programs["decoder"].ledger.count("weight-only")
    with torch.no_grad():
        assert sqnr(copy.deepcopy(model).float()(IDS).logits, qmodel(IDS).logits) > 30
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.slow
def test_sound_of_16_bits_is_that_of_the_model():
    """Callers convert it to the float model's dtype, in calls and calibration data."""
    model = generator("Whisper", encoder_layers=1, decoder_layers=1).to(torch.bfloat16)
    narrow = {"input_features": prompt("Whisper")["input_features"].bfloat16()}
    tokens = torch.tensor([[3, 4], [3, 5], [3, 6]])
    data = [{**narrow, "decoder_input_ids": tokens}]
    qmodel = fxq.quantize(model, INT8, data=data)
    options = {"max_new_tokens": 5, "do_sample": False}
    wide = {"input_features": narrow["input_features"].float()}
    assert torch.equal(qmodel.generate(**narrow, **options), qmodel.generate(**wide, **options))
    with torch.no_grad():
        want = copy.deepcopy(model).float()(**wide, decoder_input_ids=tokens).logits
        assert sqnr(want, qmodel(**narrow, decoder_input_ids=tokens).logits) > 30


@pytest.mark.slow
def test_images_of_16_bits_are_those_of_the_model():
    """In calls and examples."""
    model, call = vision_language(layers=1)
    call["pixel_values"] = call["pixel_values"].bfloat16()
    qmodel = fxq.quantize(model.to(torch.bfloat16), INT8, example_inputs={"image": call})
    wide = {**call, "pixel_values": call["pixel_values"].float()}
    options = {"max_new_tokens": 5, "do_sample": False}
    assert torch.equal(qmodel.generate(**call, **options), qmodel.generate(**wide, **options))
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    vit = transformers.ViTModel(transformers.ViTConfig(**sizes, image_size=28, patch_size=14)).eval().to(torch.bfloat16)
    pixels = call["pixel_values"]
    encoder = fxq.quantize(vit, INT8)
    with torch.no_grad():
        want = copy.deepcopy(vit).float()(pixels.float()).last_hidden_state
        assert sqnr(want, encoder(pixel_values=pixels).last_hidden_state) > 30


@pytest.mark.slow
def test_the_model_and_its_library_are_unchanged():
    from transformers.cache_utils import DynamicLayer
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    model = generator("Llama", num_hidden_layers=1)
    before = DynamicLayer.get_seq_length, ALL_ATTENTION_FUNCTIONS["sdpa"], generated(model, length=4).sequences
    fxq.quantize(model, INT8)
    assert before[:2] == (DynamicLayer.get_seq_length, ALL_ATTENTION_FUNCTIONS["sdpa"])
    assert torch.equal(before[2], generated(model, length=4).sequences)


def test_activations_are_calibrated_on_calls_of_the_model():
    model = generator("Llama", num_hidden_layers=1)
    data = [{"input_ids": torch.randint(3, 50, (2, length))} for length in (4, 9, 16)]
    qmodel = fxq.quantize(model, fxq.Recipe.static(optimize="coverage"), data=data)
    assert qmodel.programs.programs["decoder"].ledger.count("int8")
    with torch.no_grad():
        assert sqnr(model(data[1]["input_ids"]).logits, qmodel(data[1]["input_ids"]).logits) > 12


@pytest.mark.slow
def test_data_is_read_as_far_as_it_is_needed(tmp_path):
    model, data = generator("Llama", num_hidden_layers=1), itertools.cycle([{"input_ids": IDS}])
    fxq.quantize(model, INT8, data=data)
    with pytest.raises(fxq.InputError, match="no checkpoint"):
        fxq.quantize(model, INT8, data=data, checkpoint=tmp_path / "c")


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
def test_four_bits_leave_the_head_eight_and_use_data(tied):
    """The bits of the head, and what gptq wins on sequences that it has not seen."""
    model = generator("GPT2", n_layer=1, tie_word_embeddings=tied)
    recipe = fxq.Recipe.weight_only(bits=4, per=16, backend="reference")
    data = [{"input_ids": ids} for ids in torch.randint(3, 50, (4, 8, 24), generator=torch.Generator().manual_seed(1))]
    rounded, fitted = fxq.quantize(model, recipe), fxq.quantize(model, recipe, data=data)
    (program,) = fitted.programs.models
    specs = {path.rpartition(".")[2]: bits for path, bits in weight_bits(program) if "wpe" not in path}
    assert specs["lm_head"] >= 8 and specs["wte"] >= 8
    assert specs["c_fc"] == specs["c_attn"] == 4 + (16 + 8) / 16  # scale and zero point per block
    assert [edit.rule for edit in program.history["gptq"].edits] == ["gptq"] * 4
    with torch.no_grad():
        wanted = model(IDS).logits
        assert sqnr(wanted, fitted(IDS).logits) > sqnr(wanted, rounded(IDS).logits) + 1  # dB
    selected = recipe.override("lm_head", recipe.config).override("transformer.wte", recipe.config)
    (program,) = fxq.quantize(model, selected).programs.models
    assert dict(weight_bits(program))["lm_head"] == 5.5


@pytest.mark.slow
def test_overrides_select_in_the_encoder_or_the_decoder():
    """Paths are those of the whole model, and the head of a model of 4 bits has 8."""
    model = generator("T5", num_layers=1)
    recipe = fxq.Recipe.weight_only(bits=4, per=16, backend="reference")
    attention = "encoder.block.0.layer.0.SelfAttention.q"
    qmodel = fxq.quantize(model, recipe.override(attention, fxq.FLOAT))
    (encoder,) = qmodel.get_encoder().programs.models
    decoder = qmodel.programs.programs["decoder"]
    assert [entry.precision for entry in encoder.ledger if entry.path == attention] == ["float"]
    assert dict(weight_bits(encoder))[attention.replace(".q", ".k")] == 5.5
    assert dict(weight_bits(decoder))["lm_head"] >= 8
    with pytest.raises(fxq.RecipeError, match=r"'encoder\.block\.7' selects nothing in any program"):
        fxq.quantize(model, recipe.override("encoder.block.7", fxq.FLOAT))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("tied", [False, True])
def test_eight_bits_have_scales_per_block_and_an_override_wins(tied):
    model = generator("Llama", num_hidden_layers=1, hidden_size=256, intermediate_size=512, tie_word_embeddings=tied)
    for layer in model.model.modules():
        if isinstance(layer, torch.nn.Linear):
            layer.weight.data[:, 0] *= 20  # outliers, which coarsen the grid of the whole row if it has one scale
    recipe = fxq.Recipe.weight_only(backend="reference")
    blocks, rows = (fxq.quantize(model, r) for r in (recipe, recipe.override(fxq.by_op("linear"), recipe.config)))
    (program,) = blocks.programs.models
    bits = dict(weight_bits(program))
    assert bits.pop("lm_head") == bits.pop("model.embed_tokens") == 8 + 16 / 64
    assert set(bits.values()) == {8 + 16 / 128}
    tables = {t.data_ptr() for name, t in program.state_dict().items() if t.shape == (model.vocab_size, 256)}
    assert len(tables) == (1 if tied else 2)
    assert dict(weight_bits(rows.programs.models[0]))["model.layers.0.mlp.down_proj"] == 8 + (32 + 32) / 512
    with torch.no_grad():
        wanted = model(IDS).logits
        assert sqnr(wanted, blocks(IDS).logits) > sqnr(wanted, rows(IDS).logits) + 1  # dB


def weight_bits(program):
    """Module path and bits of each integer weight."""
    return [(e.path, e.weight_bits) for e in program.ledger if e.weight_values]
