from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from jaxdist.data.source import take
from jaxdist.data.text import dataset as text
from jaxdist.data.text import ngram
from jaxdist.data.text.dataset import TextConfig
from jaxdist.data.text.tokenizer import BpeTokenizerConfig, train_bpe
from jaxdist.errors import DataError


@pytest.fixture
def books(tmp_path: Path) -> Path:
    """Twenty files of 1,000 bytes."""
    for number in range(20):
        (tmp_path / f"n{number:02}.txt").write_text(f"{number:09}\n" * 100)
    return tmp_path


def _facts(config: TextConfig) -> dict[str, int]:
    return dict(_streams(config).facts)


def _streams(config: TextConfig) -> text.Streams:
    return text.load_streams(config, config.listed(), config.tokenizer.build())


def _config(folder: Path, **settings: Any) -> TextConfig:
    return TextConfig(**{"files": [str(folder / "*.txt")], "window": 64} | settings)


def test_the_standard_library_needs_nothing_but_python() -> None:
    dataset = TextConfig().build()
    facts = _facts(TextConfig())
    assert dataset.vocab_size == 257
    assert dataset.classes is None
    assert facts["train_bytes"] > 5e6
    assert 0.01 < facts["heldout_bytes"] / facts["train_bytes"] < 0.15
    assert dataset.heldout is not None
    batch = take(dataset.train, np.array([0, len(dataset.train) - 1]))
    assert batch["tokens"].shape == (2, 257)
    assert batch["segments"].shape == (2, 256)
    assert "standard library of Python" in dataset.description


def test_every_byte_is_in_a_split(books: Path) -> None:
    dataset = _config(books, heldout_fraction=0.3).build()
    assert dataset.heldout is not None
    streams = _streams(_config(books, heldout_fraction=0.3))
    train_bytes = streams.facts["train_bytes"]
    assert train_bytes + streams.facts["heldout_bytes"] == 20_000
    assert len(streams.train) == train_bytes + train_bytes / 1000 + 1
    lengths = (len(streams.train), len(streams.heldout))
    assert (len(dataset.train), len(dataset.heldout)) == tuple((n - 1) // 64 for n in lengths)
    assert "20 files" in dataset.description
    assert "held out (by file)" in dataset.description


def test_one_file_says_how_it_was_cut(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("line\n" * 1000)
    assert "(the last part of one file)" in _config(tmp_path).build().description


def test_nothing_held_out(books: Path) -> None:
    dataset = _config(books, heldout_fraction=0.0).build()
    assert dataset.heldout is None
    assert dataset.baselines() == {}
    assert "nothing held out" in dataset.description


def test_files_imply_their_source_and_one_glob_needs_no_list() -> None:
    config = TextConfig.model_validate({"type": "text", "files": "books/*.txt"})
    assert (config.source, config.files) == ("files", ["books/*.txt"])
    assert TextConfig.model_validate(config.model_dump()) == config


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"source": "files"}, r"source 'files' needs data\.files"),
        ({"source": "python-stdlib", "files": ["a"]}, r"files \['a'\] have no effect with source"),
        ({"files": []}, r"data\.files is empty: name a file"),
        ({"source": "a.txt"}, r"unknown source 'a\.txt': .* name its files in data\.files"),
    ],
)
def test_contradictory_sources(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        TextConfig(**settings)


def test_the_second_time_comes_from_the_cache(
    books: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = _config(books).build()
    monkeypatch.setattr(text, "split_documents", None)
    second = _config(books, window=32).build()
    assert len(first.train) == len(second.train) // 2
    np.testing.assert_array_equal(
        first.train[0]["tokens"][:33],
        second.train[0]["tokens"],
    )
    assert len(list((own_cache / "tokens").iterdir())) == 1


@pytest.mark.parametrize("change", ["content", "time", "new file", "fraction", "tokenizer"])
def test_what_the_tokens_depend_on_is_in_the_key(
    books: Path, own_cache: Path, tmp_path_factory: pytest.TempPathFactory, change: str
) -> None:
    _config(books).build()
    settings: dict[str, Any] = {}
    if change == "content":
        (books / "n00.txt").write_text("longer" * 1000)
    elif change == "time":
        os.utime(books / "n00.txt", ns=(1, 1))
    elif change == "new file":
        (books / "new.txt").write_text("x" * 500)
    elif change == "fraction":
        settings["heldout_fraction"] = 0.5
    else:
        file = tmp_path_factory.mktemp("bpe") / "t.json"
        train_bpe([b"000"], 256, file)
        settings["tokenizer"] = BpeTokenizerConfig(type="bpe", file=str(file))
    _config(books, **settings).build()
    assert len(list((own_cache / "tokens").iterdir())) == 2


@pytest.mark.parametrize("name", ["train.npy", "heldout.npy", "facts.json"])
@pytest.mark.parametrize("damage", ["truncate", "garbage", "remove"])
def test_a_damaged_cache_is_made_again(
    books: Path, own_cache: Path, name: str, damage: str
) -> None:
    whole = _config(books).build()
    expected = take(whole.train, np.arange(len(whole.train)))
    (file,) = (own_cache / "tokens").glob(f"*/{name}")
    if damage == "remove":
        file.unlink()
    else:
        content = file.read_bytes()
        file.write_bytes(content[: len(content) // 2] if damage == "truncate" else b"garbage")
    again = _config(books).build()
    np.testing.assert_array_equal(
        take(again.train, np.arange(len(again.train)))["tokens"], expected["tokens"]
    )


def test_without_a_cache_the_tokens_stay_in_memory(
    books: Path, own_cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (own_cache / "tokens").write_text("a file where the folder should be")
    with caplog.at_level(logging.WARNING):
        dataset = _config(books).build()
    assert len(dataset.train) > 0
    (record,) = caplog.records
    assert "kept only in memory, because the cache" in record.getMessage()
    assert dataset.baselines()["trigram"] > 0


def test_the_baseline_is_computed_once(
    books: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loss = _config(books).build().baselines()
    assert list(loss) == ["trigram"]
    monkeypatch.setattr(ngram.TrigramModel, "fit", None)
    assert _config(books, window=8).build().baselines() == loss
    (kept,) = (own_cache / "tokens").glob("*/trigram.json")
    assert json.loads(kept.read_text()) == loss["trigram"]


def test_a_bpe_gives_its_own_vocabulary(books: Path, tmp_path_factory: Any) -> None:
    file = tmp_path_factory.mktemp("bpe") / "t.json"
    bpe = train_bpe([b"000000001\n"] * 9, 260, file)
    tokenizer = BpeTokenizerConfig(type="bpe", file=str(file))
    dataset = _config(books, tokenizer=tokenizer, heldout_fraction=0.0).build()
    assert dataset.vocab_size == bpe.vocab_size
    tokens = dataset.train[0]["tokens"]
    assert tokens[0] == bpe.end_of_document
    assert bpe.decode(tokens.tolist()).startswith("000000000\n000000000\n")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"window": 50_000}, r"training split of .* has \d+ tokens, but a window needs 50001"),
        ({"window": 3_000}, r"held-out split has \d+ tokens, but a window needs 3001.*fraction"),
    ],
)
def test_too_little_text(books: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        _config(books, **settings).build()


def test_empty_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").touch()
    with pytest.raises(DataError, match="has 1 tokens, but a window needs 65"):
        _config(tmp_path).build()


def test_bytes_take_what_is_not_utf8(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"caf\xe9 " * 100)  # codespell:ignore caf
    assert _facts(_config(tmp_path, heldout_fraction=0.0))["train_bytes"] == 500
