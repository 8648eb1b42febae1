"""lm-evaluation-harness with a quantized model: its adapter for models of transformers takes it as it is."""

import pytest

import fxq

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")
huggingface = pytest.importorskip("lm_eval.models.huggingface", exc_type=ImportError)

from lm_eval.api.instance import Instance  # noqa: E402

from scripts.networks.generators import generator  # noqa: E402
from tests.integrations.test_transformers import INT8  # noqa: E402

pytestmark = pytest.mark.any_cpu

WORDS = ["[PAD]", "[UNK]", "</s>", *"abcdefghijkl"]


@pytest.fixture(scope="module")
def harness():
    """Harness models of a float Llama and of the quantized one."""
    words = tokenizers.models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]")
    own = tokenizers.Tokenizer(words)
    own.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "eos_token": "</s>"}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=own, **special)
    model = generator("Llama", num_hidden_layers=1, vocab_size=len(WORDS))
    options = {"tokenizer": tokenizer, "batch_size": 2, "max_length": 64}
    return [huggingface.HFLM(pretrained=m, **options) for m in (model, fxq.quantize(model, INT8))]


def requests(kind, *arguments):
    return [Instance(request_type=kind, doc={}, arguments=a, idx=i) for i, a in enumerate(arguments)]


def test_each_kind_of_request(harness):
    choices = requests("loglikelihood", ("a b c", " d"), ("e f", " g h"), ("b c d e", " a"))
    rolling = requests("loglikelihood_rolling", ("a b c d e f",))
    until = requests("generate_until", ("a b c", {"until": ["k"], "max_gen_toks": 5, "do_sample": False}))
    want, got = ([value for value, _ in lm.loglikelihood(choices)] for lm in harness)
    assert got == pytest.approx(want, abs=0.02) and got != want  # int8 weights
    want, got = (lm.loglikelihood_rolling(rolling) for lm in harness)
    assert got == pytest.approx(want, abs=0.05) and got != want
    want, got = (lm.generate_until(until) for lm in harness)
    assert got == want and len(got) == 1


class Rows(list):
    """Data set of the harness."""

    features = dict.fromkeys("qcg")


def test_a_local_task(harness):
    pytest.importorskip("datasets")
    lm_eval = pytest.importorskip("lm_eval", exc_type=ImportError)
    rows = [("a b c", [" d", " e"], 0), ("f g", [" h", " k"], 1), ("b a", [" l", " c"], 1)]
    dataset = Rows(dict(zip("qcg", row, strict=True)) for row in rows)
    task = {
        "task": "tiny",
        "custom_dataset": lambda **options: {"test": dataset},
        "output_type": "multiple_choice",
        "test_split": "test",
        "doc_to_text": "{{q}}",
        "doc_to_choice": "{{c}}",
        "doc_to_target": "{{g}}",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}],
    }
    want, got = (lm_eval.simple_evaluate(model=lm, tasks=[task], bootstrap_iters=0)["results"] for lm in harness)
    assert got["tiny"]["acc,none"] == want["tiny"]["acc,none"]
