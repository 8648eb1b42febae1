"""The language model of Python's documentation: its texts, and that it learns them."""

import sys

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("tokenizers")

SOURCE = '''"""Of the module."""

class Stack:
    """A stack
    of values."""

    def pop(self):
        "Of a method."

    async def top(self):
        """Of the module."""

def plain():
    pass
'''


@pytest.fixture
def pydoc(script, monkeypatch):
    """The script, with sizes that a test can train."""
    module = script("networks.pydoc_model")
    small = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    monkeypatch.setattr(module, "SIZES", {**small, "num_key_value_heads": 2, "max_position_embeddings": 128})
    monkeypatch.setattr(module, "WORDS", 280)
    return module


def test_docstrings_of_a_file_come_once(pydoc, tmp_path):
    path, seen = tmp_path / "module.py", {"Of a method."}
    path.write_text(SOURCE)
    assert pydoc.new_docstrings(path, seen) == ["Of the module.", "A stack\nof values."]
    assert pydoc.new_docstrings(path, seen) == []


def test_texts_are_those_of_the_library_that_runs(pydoc):
    files = list(pydoc.library_files())
    names = {path.stem if path.stem != "__init__" else path.parent.name for path in files}
    assert {"argparse", "json", "pathlib"} <= names
    assert not any({"site-packages", "test", "tests"} & set(path.parts) for path in files)
    assert files == list(pydoc.library_files()) and sys.modules.get("antigravity") is None  # files are only read


def test_each_tenth_document_is_held_out(pydoc):
    training, held_out = pydoc.split([str(i) for i in range(25)])
    assert held_out == ["9", "19"] and len(training) == 23 and not {*training} & {*held_out}


def test_rows_are_the_documents_one_after_the_other(pydoc):
    texts = ["Return the length of the list.", "Return a copy of the list."] * 4
    tokenizer = pydoc.vocabulary(texts)
    rows = pydoc.in_rows(tokenizer, texts, length=4)
    joined = tokenizer.decode(rows.flatten().tolist(), skip_special_tokens=False)
    whole = "".join(pydoc.END + text for text in texts)
    assert whole.startswith(joined) and len(whole) - len(joined) < 40


def test_it_learns_and_is_read_from_its_folder(pydoc, monkeypatch, tmp_path, capsys):
    texts = [f"Return the length of list {i}." for i in range(300)]
    monkeypatch.setattr(pydoc, "documents", lambda: texts)
    monkeypatch.setattr(pydoc, "WARM_UP", 2)
    monkeypatch.setenv("FXQ_CACHE", str(tmp_path))
    rows = pydoc.in_rows(pydoc.vocabulary(texts), texts, length=8)
    assert pydoc.perplexity(pydoc.trained(rows, 40, rate=0.02), rows) < 0.2 * pydoc.WORDS  # untrained: about WORDS
    model, _, held_out = pydoc.pydoc_model(steps=3)
    assert "training 3 steps" in capsys.readouterr().err
    again, tokenizer, same_rows = pydoc.pydoc_model(steps=3)
    assert "training" not in capsys.readouterr().err
    assert torch.equal(held_out, same_rows)
    assert tokenizer.decode(held_out[0].tolist()).startswith("Return the length of list 9")
    with torch.no_grad():
        assert torch.equal(model(held_out).logits, again(held_out).logits)
