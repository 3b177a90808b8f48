from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from jaxdist.data.text.tokenizer import BpeTokenizer, ByteTokenizer, TokenizerConfig, train_bpe
from jaxdist.errors import DataError

_TEXT = [b"the cat sat on the mat, the cat sat", "größe, größer, am größten".encode()] * 5


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> BpeTokenizer:
    return train_bpe(_TEXT, 300, tmp_path_factory.mktemp("bpe") / "deep" / "tokenizer.json")


@given(st.binary(max_size=50))
def test_bytes_are_their_own_tokens(document: bytes) -> None:
    tokenizer = ByteTokenizer()
    (tokens,) = tokenizer.encode([document])
    assert bytes(tokens.tolist()) == document
    assert tokenizer.decode(tokens.tolist()) == document.decode(errors="replace")


def test_bytes_leave_the_separator_out() -> None:
    assert ByteTokenizer().decode([104, 256, 105]) == "hi"
    assert (ByteTokenizer.vocab_size, ByteTokenizer.end_of_document) == (257, 256)


def test_bpe_merges_what_is_frequent(bpe: BpeTokenizer) -> None:
    (tokens,) = bpe.encode(_TEXT[:1])
    assert len(tokens) < len(_TEXT[0]) / 2
    assert tokens.max() < bpe.end_of_document == bpe.vocab_size - 1
    assert bpe.vocab_size <= 301


def test_bpe_gives_any_text_back(bpe: BpeTokenizer) -> None:
    texts = [*_TEXT, b"", b" \n\t x  y", "日本語 \x00 🎈".encode()]
    for text, tokens in zip(texts, bpe.encode(texts), strict=True):
        assert bpe.decode([bpe.end_of_document, *tokens.tolist()]) == text.decode()


def test_bpe_encodes_many_documents_in_order(bpe: BpeTokenizer) -> None:
    documents = [f"document {i}".encode() for i in range(2500)]
    tokens = bpe.encode(documents)
    assert [bpe.decode(tokens[i].tolist()) for i in (0, 1024, 2499)] == [
        f"document {i}" for i in (0, 1024, 2499)
    ]


def test_a_digest_tells_encodings_apart(bpe: BpeTokenizer, tmp_path: Path) -> None:
    other = train_bpe(_TEXT, 280, tmp_path / "other.json")
    same = BpeTokenizer(tmp_path / "other.json")
    assert other.digest == same.digest
    assert len({other.digest, bpe.digest, ByteTokenizer.digest}) == 3


def test_choices(bpe: BpeTokenizer, tmp_path: Path) -> None:
    train_bpe(_TEXT, 280, tmp_path / "t.json")
    adapter = TypeAdapter(TokenizerConfig)
    assert adapter.validate_python({"type": "bytes"}).build().vocab_size == 257
    config = adapter.validate_python({"type": "bpe", "file": str(tmp_path / "t.json")})
    np.testing.assert_array_equal(
        config.build().encode(_TEXT)[0], BpeTokenizer(tmp_path / "t.json").encode(_TEXT)[0]
    )


def test_a_missing_file_suggests_its_neighbour(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match=r"tokeniser\.json cannot be read.*mean tokenizer\.json\?"):
        BpeTokenizer(tmp_path / "tokeniser.json")
    with pytest.raises(DataError, match=r"tokenizer\.json is not a tokenizer\.json: .*tokenize"):
        BpeTokenizer(tmp_path / "tokenizer.json")
    os.mkfifo(tmp_path / "pipe.json")
    with pytest.raises(DataError, match=r"pipe\.json cannot be read: it is a pipe, not a reg"):
        BpeTokenizer(tmp_path / "pipe.json")


def test_training_needs_room_text_and_a_place(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="vocab_size 255 is too small"):
        train_bpe(_TEXT, 255, tmp_path / "t.json")
    with pytest.raises(DataError, match=r"byte 3 of a document that begins with b'caf\\xe9'"):
        train_bpe([b"caf\xe9"], 300, tmp_path / "t.json")
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"t\.json cannot be written"):
        train_bpe(_TEXT, 300, tmp_path / "file" / "t.json")
