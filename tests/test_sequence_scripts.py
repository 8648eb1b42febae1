"""Parts of the scripts for sequence networks: networks, data, other tools, judgements; without extra packages."""

import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.any_cpu

ROOT = Path(__file__).resolve().parents[1]


def test_bert_has_the_size_of_minilm(script):
    model = script("networks.sequence").Bert().eval()
    layer = 4 * (384 * 384 + 384) + 2 * 384 * 1536 + 1536 + 384 + 4 * 384
    assert sum(p.numel() for p in model.parameters()) == 6 * layer + (30522 + 512) * 384 + 2 * 384
    with torch.no_grad():
        assert model(torch.randint(30522, (2, 7))).shape == (2, 7, 384)


def test_speech_is_embedded_with_length_one(script):
    networks = script("networks.sequence")
    with torch.no_grad():
        y = networks.SpeechEncoder().eval()(torch.rand(3, 20, 40))
    assert y.shape == (3, 256)
    assert torch.allclose(y.norm(dim=1), torch.ones(3), atol=1e-5)


@pytest.mark.parametrize(("hertz", "band"), [(500.0, 6), (3000.0, 27)])
def test_a_tone_is_loudest_in_the_band_around_it(script, hertz, band):
    """Of 40 bands from 0 to 8 kHz, 1.105 mel apart; 500 Hz is mel 7.5, 3000 Hz mel 31.0 by Slaney's scale."""
    time = torch.arange(16_000) / 16_000
    powers = script("demo.sequence_data").mel_powers(torch.sin(2 * math.pi * hertz * time))
    assert powers.shape == (101, 40)
    mel = hertz * 3 / 200 if hertz < 1000 else 15 + 27 * math.log(hertz / 1000) / math.log(6.4)
    top = 15 + 27 * math.log(8) / math.log(6.4)
    assert abs(mel / top * 41 - 1 - band) < 1
    assert int(powers[50].argmax()) == band


def test_docstrings_are_the_same_at_every_run(script):
    data = script("demo.sequence_data")
    texts = data.docstrings(20)
    assert len(texts) == len({text.summary for text in texts}) == 20
    assert texts == data.docstrings(20)
    assert all(len(text.summary.split()) >= 5 for text in texts)


def test_what_is_not_installed_says_how_to_get_it(script, tmp_path):
    data = script("demo.sequence_data")
    with pytest.raises(data.Missing, match="no_such_package is not installed: run with --install FOLDER"):
        data.package("no_such_package")
    with pytest.raises(data.Missing, match="apt-get install"):
        data.data_file("no/such/file", [tmp_path])


def test_words_are_spelled_letter_by_letter(script):
    data = script("demo.sequence_data")
    assert data.spelled("ab-").tolist() == [[3, 4, 1, 2]]  # what is no letter is unknown


def test_the_decoder_stops_at_the_last_phoneme(script):
    subjects, data = script("demo.sequence_subjects"), script("demo.sequence_data")
    said = iter([5, 7, data.END, 9])

    def decoder(sound, hidden):
        scores = torch.zeros(1, 74)
        scores[0, next(said)] = 1.0
        return scores, hidden

    assert subjects.spoken((lambda word: torch.zeros(1, 256), decoder), data.spelled("word")) == [5, 7]


def test_a_goal_that_is_missed_is_said(script):
    demo, subjects = script("demo.sequence"), script("demo.sequence_subjects")
    subject = subjects.Subject("net", [], None, None, None, {"fxq static": {"cosine": 0.98}})
    assert demo.goals(subject, demo.Row("net", "fxq static", {"cosine": 0.99})) == "cosine ≥ 0.98: met"
    assert demo.goals(subject, demo.Row("net", "fxq static", {"cosine": 0.97})) == "cosine ≥ 0.98: MISSED"
    assert demo.goals(subject, demo.Row("net", "fxq static", note="it failed")) == "cosine ≥ 0.98: MISSED"
    assert demo.goals(subject, demo.Row("net", "fxq static", {"cosine": 1.0}, is_float=True)).endswith(
        ": met, in float"
    )
    assert demo.goals(subject, demo.Row("net", "torchao dynamic", {"cosine": 0.5})) == ""


def test_torch_ao_quantizes_beside_fxq(script):
    """And leaves the engine as it was; the state dict is a quarter of the float one's, and a little more."""
    rivals = script("bench.rivals")
    torch.manual_seed(0)
    model, x = torch.nn.Sequential(torch.nn.Linear(256, 256)).eval(), torch.randn(4, 256)
    before = torch.backends.quantized.engine
    with rivals.restored_engine(), torch.no_grad():
        contender = rivals.torch_ao()(model, (x,))
        assert torch.nn.functional.cosine_similarity(contender.call(x), model(x)).min() > 0.99
    assert torch.backends.quantized.engine == before
    assert 0.25 < contender.nbytes / rivals.saved(model) < 0.3


@pytest.mark.slow
def test_bench_sequence_measures_and_judges(tmp_path):
    command = [sys.executable, "-m", "scripts.bench.sequence", "--only", "gru", "--quantizer", "fxq dynamic"]
    command += ["--quantizer", "torch.ao", "--seconds", "0.1", "--json", str(tmp_path / "numbers.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    data = json.loads((tmp_path / "numbers.json").read_text())
    names = [row["quantizer"] for row in data["tables"]["gru"]]
    assert names[:2] == ["float", "fxq dynamic"]
    assert any(name.startswith("torch.ao dynamic, ") for name in names)
    judged = {number["what"]: number for number in data["numbers"]}
    assert judged["fxq dynamic: times faster than float"]["value"] > 0
    assert judged["fxq dynamic: times faster than torch.ao"]["detail"].endswith("dB")
    assert re.search(r"VNNI: (yes|no)", done.stdout)
