import io
import json

import pytest
from rich.console import Console

from jaxdist.commands.tokenize import tokenize
from jaxdist.config import Document, validate
from jaxdist.data.text.dataset import TextConfig
from jaxdist.data.text.tokenizer import BpeTokenizer
from jaxdist.errors import DataError


def run(out, files, **settings):
    console = Console(file=io.StringIO(), width=200)
    tokenize(
        out, files, **{"vocab_size": 300, "heldout_fraction": 0.2, **settings}, console=console
    )
    return console.file.getvalue()


@pytest.fixture
def texts(tmp_path):
    for i in range(10):
        (tmp_path / f"{i}.txt").write_text(f"the word number {i} and the other words\n" * 20)
    return str(tmp_path / "*.txt")


def test_a_run_can_use_what_was_learned(tmp_path, texts):
    out = tmp_path / "tokenizer.json"
    said = run(out, [texts])
    assert "bytes a token" in said
    values = {"type": "text", "files": [texts], "window": 8, "heldout_fraction": 0.2,
              "tokenizer": {"type": "bpe", "file": str(out)}}  # fmt: skip
    dataset = validate(Document(values), TextConfig).build()
    assert dataset.vocab_size == BpeTokenizer(out).vocab_size
    words = "the other words"
    assert dataset.tokenizer.decode(dataset.tokenizer.encode([words.encode()])[0]) == words


def test_nothing_held_out_is_learned_from(tmp_path):
    """A word that only the last part of a single file has gets no token of its own."""
    text = "alpha beta gamma\n" * 50 + "zyzzyva zyzzyva\n" * 50
    (tmp_path / "one.txt").write_text(text)
    out = tmp_path / "tokenizer.json"
    run(out, [str(tmp_path / "one.txt")], heldout_fraction=0.6)
    vocabulary = json.loads(out.read_text())["model"]["vocab"]
    assert any("alpha" in token for token in vocabulary)
    assert not any("zyz" in token for token in vocabulary)


def test_text_that_is_not_utf8_is_named(tmp_path):
    (tmp_path / "bad.txt").write_bytes(b"\xff\xfe" * 10)
    with pytest.raises(DataError, match=r"bad\.txt is not UTF-8"):
        run(tmp_path / "t.json", [str(tmp_path / "bad.txt")])


def test_files_without_text_are_refused(tmp_path):
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(DataError, match="the 1 files that match have no text to learn from"):
        run(tmp_path / "out.json", [str(tmp_path / "empty.txt")])


def test_a_vocabulary_that_no_memory_holds_is_refused(tmp_path, texts):
    with pytest.raises(DataError, match="vocab_size 999999999 is too large: at most 1048576"):
        run(tmp_path / "out.json", [texts], vocab_size=999_999_999)
