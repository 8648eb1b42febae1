"""`generate` of quantized models: what the library lets a caller ask for, beside the float model."""

import pytest
import torch

import fxq
from fxq.common.metrics import sqnr

transformers = pytest.importorskip("transformers")

from transformers.generation.streamers import BaseStreamer  # noqa: E402

from scripts.networks.generators import generator, prompt  # noqa: E402
from tests.integrations.test_transformers import ALL_FLOAT, IDS, MASK  # noqa: E402

pytestmark = [pytest.mark.filterwarnings("ignore:nothing runs on integers"), pytest.mark.any_cpu]

TRACE = fxq.Recipe.weight_only(backend="reference", new_kinds="trace").override("*", fxq.FLOAT)


@pytest.fixture(scope="module")
def llama():
    """Float Llama, and its graph in float."""
    model = generator("Llama")
    return model, fxq.quantize(model, ALL_FLOAT)


@pytest.fixture(scope="module")
def tracing():
    """Float Llama whose layers give their attention, and its graph in float, which traces new kinds of calls."""
    model = generator("Llama", "eager", num_hidden_layers=1)
    return model, fxq.quantize(model, TRACE)


class Tokens(BaseStreamer):
    """Streamer that keeps the tokens that it gets."""

    def __init__(self):
        self.tokens, self.ended = [], False

    def put(self, value):
        self.tokens.append(value.tolist())

    def end(self):
        self.ended = True


def stops_at(length):
    class Stop(transformers.StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return torch.full((len(input_ids),), input_ids.shape[1] >= length)

    return transformers.StoppingCriteriaList([Stop()])


def run(model, seed=1, **options):
    torch.manual_seed(seed)
    call = {"input_ids": IDS, "attention_mask": MASK, "max_new_tokens": 6, "do_sample": False}
    return model.generate(**{**call, **options})


WAYS = {
    "sampling": {"do_sample": True, "top_p": 0.9, "temperature": 1.3},
    "sampled beams": {"do_sample": True, "num_beams": 2},
    "several of a prompt": {"do_sample": True, "num_return_sequences": 3},
    "stopping criteria": {"stopping_criteria": stops_at(10)},
    "a time limit": {"max_time": 60.0},
    "processors of logits": {
        "logits_processor": transformers.LogitsProcessorList([transformers.MinNewTokensLengthLogitsProcessor(7, 4, 3)]),
        "no_repeat_ngram_size": 2,
        "bad_words_ids": [[12]],
    },
    "prompts in chunks": {"prefill_chunk_size": 3},
    "no prompt": {"input_ids": None, "attention_mask": None, "bos_token_id": 1},
    "guidance": {"guidance_scale": 1.5},
}


@pytest.mark.one_in(9)
@pytest.mark.parametrize("way", WAYS)
def test_ways_to_generate(llama, way):
    """Seeded, so that the sequences of the two are equal where their logits are."""
    want, got = (run(model, **WAYS[way]) for model in llama)
    assert torch.equal(want, got)


def test_streamers_get_each_token(llama):
    streamers = [Tokens(), Tokens()]
    for model, streamer in zip(llama, streamers, strict=True):
        run(model, input_ids=IDS[2:], attention_mask=MASK[2:], streamer=streamer)
    want, got = streamers
    assert len(got.tokens) == 7 and got.tokens == want.tokens and got.ended


def test_scores_and_transition_scores(llama):
    options = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    want, got = (run(model, **options) for model in llama)
    for part in ("scores", "logits"):
        assert sqnr(torch.stack(want[part]), torch.stack(got[part])) > 80
    scores = [
        model.compute_transition_scores(result.sequences, result.scores)
        for model, result in zip(llama, (want, got), strict=True)
    ]
    torch.testing.assert_close(*scores, atol=1e-5, rtol=1e-4)


def test_a_chat_continues_with_its_cache(llama):
    """The cache of a first answer serves the second, whose prompt begins with the first and its answer."""
    sequences = []
    for model in llama:
        cache = transformers.DynamicCache(config=model.config)
        first = run(model, input_ids=IDS[2:], attention_mask=None, cache=cache)
        longer = torch.cat([first, torch.tensor([[5, 6]])], 1)
        sequences.append(run(model, input_ids=longer, attention_mask=None, cache=cache))
        assert cache.get_seq_length() == sequences[-1].shape[1] - 1
    assert torch.equal(*sequences)


def test_a_quantized_model_assists(llama):
    model, qmodel = llama
    single = {"input_ids": IDS[2:], "attention_mask": None}
    want = run(model, **single)
    for main, assistant in ((model, qmodel), (qmodel, model), (qmodel, qmodel)):
        assert torch.equal(run(main, **single, assistant_model=assistant), want)


def test_static_caches_are_refused_briefly(llama):
    for name in ("static", "sliding_window"):
        with pytest.raises(fxq.InputError, match="no StaticCache: leave out cache_implementation") as error:
            run(llama[1], cache_implementation=name)
        assert len(str(error.value)) < 150
    offloading = transformers.DynamicCache(config=llama[1].config)
    offloading.offloading = True  # transformers needs a GPU to make one that does
    with pytest.raises(fxq.InputError, match="no offloaded cache: leave out cache_implementation"):
        llama[1](IDS, cache=offloading)


def test_results_that_no_graph_has_are_refused(llama):
    _, qmodel = llama
    for option in ("output_hidden_states", "output_attentions"):
        with pytest.raises(fxq.InputError, match=rf"{option} is True, not left out.*new_kinds") as error:
            run(qmodel, return_dict_in_generate=True, **{option: True})
        assert len(str(error.value)) < 500
    embeddings = torch.rand(1, 3, 32)
    with pytest.raises(fxq.InputError, match="inputs_embeds is a tensor"):
        qmodel(inputs_embeds=embeddings)
    with pytest.raises(fxq.InputError, match="no input_ids and no inputs_embeds"):
        qmodel(attention_mask=MASK)


@pytest.mark.slow
def test_further_results_are_traced_when_asked_for(tracing):
    """Hidden states, attention, embeddings in place of tokens, the loss: each kind of call gets a program."""
    model, qmodel = tracing
    for option, part in (("output_hidden_states", "hidden_states"), ("output_attentions", "attentions")):
        got, want = (run(m, return_dict_in_generate=True, **{option: True}) for m in (qmodel, model))
        assert len(got[part]) == 6
        for step, other_step in zip(want[part], got[part], strict=True):
            for value, traced in zip(step, other_step, strict=True):
                assert sqnr(value, traced) > 80
    embeddings = model.get_input_embeddings()(IDS).detach()
    want, got = (run(m, input_ids=None, inputs_embeds=embeddings) for m in tracing)
    assert torch.equal(want, got)
    with torch.no_grad():
        assert sqnr(*(m(IDS, attention_mask=MASK, labels=IDS).loss[None] for m in tracing)) > 80
    assert len(qmodel.programs.programs) == 5
    run(qmodel, return_dict_in_generate=True, output_hidden_states=True)
    assert len(qmodel.programs.programs) == 5


def test_an_example_adds_hidden_states():
    model = generator("Llama", num_hidden_layers=1)
    example = {"input_ids": IDS, "attention_mask": MASK, "output_hidden_states": True}
    qmodel = fxq.quantize(model, ALL_FLOAT, example_inputs={"hidden": example})
    assert list(qmodel.programs.programs) == ["decoder", "hidden"]
    with torch.no_grad():
        want, got = (m(IDS, attention_mask=MASK, output_hidden_states=True).hidden_states for m in (model, qmodel))
    assert len(want) == len(got) == 2 and all(sqnr(*pair) > 80 for pair in zip(want, got, strict=True))


@pytest.mark.slow
def test_encoder_decoders_trace_new_kinds_too():
    model = generator("T5", num_layers=1)
    qmodel = fxq.quantize(model, TRACE)
    call = {**prompt("T5"), "labels": IDS[:, :4].contiguous()}
    with torch.no_grad():
        want, got = model(**call), qmodel(**call)
    assert sqnr(want.logits, got.logits) > 80 and sqnr(want.loss[None], got.loss[None]) > 80
