"""Data of recommenders: MovieLens-100K, Criteo's format, and generated clicks."""

from __future__ import annotations

import hashlib
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from jaxdist.data.recommend import movielens
from jaxdist.data.recommend.clicks import ClicksConfig
from jaxdist.data.recommend.criteo import COUNTS, IDS, CriteoConfig
from jaxdist.data.recommend.movielens import MovieLensConfig
from jaxdist.data.recommend.rows import hashed
from jaxdist.data.source import take
from jaxdist.errors import DataError

_FILES = {
    "ml-100k.inter": "user_id:token\titem_id:token\trating:float\ttimestamp:float\n"
    + "".join(f"{n % 5}\t{n % 4}\t{1 + n % 5}\t9\n" for n in range(40)),
    "ml-100k.user": "user_id:token\tage:token\tgender:token\toccupation:token\tzip_code:token\n"
    + "".join(f"{n}\t{20 + n}\tF\tother\t0\n" for n in range(5)),
    "ml-100k.item": "item_id:token\tmovie_title:token_seq\trelease_year:token\tclass:token_seq\n"
    + "".join(f"{n}\tFilm\t199{n}\tDrama War\n" for n in range(3)),
}


@pytest.fixture
def published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with small files in the published format, which count as the published ones."""
    return _published(tmp_path, monkeypatch, _FILES)


def _published(folder: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).write_text(text)
    digests = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in files.items()}
    monkeypatch.setattr(movielens, "SHA256", digests)
    return folder


def _movielens(folder: Path, **settings: Any) -> Any:
    return MovieLensConfig(type="movielens", directory=str(folder), **settings).build()


def test_folds_divide_the_ratings(published: Path) -> None:
    splits = [_movielens(published, fold=fold).heldout for fold in range(5)]
    assert [len(split) for split in splits] == [8] * 5
    one = _movielens(published)
    assert (len(one.train), len(one.heldout)) == (32, 8)
    assert dict(one.fields) == {"user": 5, "item": 4}
    spared = _movielens(published, folds=10, spare=1, target="liked", fields=("genres", "age"))
    assert (len(spared.train), len(spared.heldout)) == (32, 4)
    # The film 3 is in no file, and has an id of its own.
    assert dict(spared.fields) == {"genres": 2, "age": 5}
    assert set(take(spared.train, np.arange(32))["target"].tolist()) == {0.0, 1.0}


def test_files_are_fetched_once_and_checked(
    published: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def fetched(command: list[str], **others: Any) -> None:
        calls.append(command)
        with zipfile.ZipFile(Path(command[-1]) / "recbole.whl", "w") as archive:
            for name, text in _FILES.items():
                archive.writestr(f"{movielens.FOLDER}/{name}", text)

    monkeypatch.setattr(movielens.subprocess, "run", fetched)
    config = MovieLensConfig(type="movielens")
    assert len(config.build().train) == len(config.build().train) == 32
    assert len(calls) == 1


def test_a_fetch_that_fails_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(command: list[str], **others: Any) -> None:
        raise subprocess.CalledProcessError(1, command, stderr="a\nno such index")

    monkeypatch.setattr(movielens.subprocess, "run", fails)
    with pytest.raises(DataError, match=r"no such index.*data\.directory"):
        MovieLensConfig(type="movielens").build()


def test_other_files_are_refused(published: Path) -> None:
    (published / "ml-100k.user").write_text("other\n")
    with pytest.raises(DataError, match="not the published file"):
        _movielens(published)
    (published / "ml-100k.user").unlink()
    with pytest.raises(DataError, match="cannot be read"):
        _movielens(published)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("ml-100k.inter", ("rating:", "stars:"), "line 1 names no column 'rating'"),
        ("ml-100k.inter", ("0\t0\t1\t9\n", "0\t0\t1\n"), "line 2 has 3 values"),
        ("ml-100k.inter", ("0\t0\t1\t9\n", "0\t0\tone\t9\n"), "line 2: rating is 'one'"),
        ("ml-100k.user", ("other\t0\n", "other\t0\n"), None),
    ],
)
def test_a_line_of_a_table_that_is_wrong_is_named(
    name: str,
    change: tuple[str, str],
    message: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    files = {**_FILES, name: _FILES[name].replace(*change, 1)}
    folder = _published(tmp_path, monkeypatch, files)
    if message is None:
        _movielens(folder)
        return
    with pytest.raises(DataError, match=message):
        _movielens(folder)


@pytest.mark.parametrize(
    "settings", [{"fold": 5}, {"spare": 4}, {"fields": ("user", "user")}, {"fields": ()}]
)
def test_folds_that_cannot_be_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        MovieLensConfig(type="movielens", **settings)


def _line(label: str = "1", count: str = "3", key: str = "68fd1e64") -> str:
    return "\t".join([label, count, *[""] * (COUNTS - 1), key, *[""] * (IDS - 1)])


def _criteo(path: Path, text: str, **settings: Any) -> Any:
    path.write_text(text)
    return CriteoConfig(type="criteo", train=str(path), **settings).build()


def test_criteo_lines_become_counts_and_ids(tmp_path: Path) -> None:
    text = "".join(f"{_line(*row)}\n" for row in (("1", "3"), ("0", "-2"), ("0", "", "")))
    found = _criteo(tmp_path / "day", text, hash_size=50)
    batch = take(found.train, np.arange(3))
    np.testing.assert_allclose(batch["dense"][:, 0], [np.log(4), 0, 0], rtol=1e-6)
    assert batch["target"].tolist() == [1, 0, 0]
    assert batch["ids"].shape == (3, IDS)
    assert batch["ids"][0, 0] == hashed(np.array([0x68FD1E64], np.uint64), 50, 0)[0]
    assert batch["ids"][2, 0] == 0
    assert set(found.fields.values()) == {50}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"{_line()}\n1\t2\n", "line 2 has 2 values, expected 40"),
        (f"{_line()}\n{_line()}", "line 2 does not end with a line break"),
        (f"{_line('2')}\n", "line 1: the label is '2'"),
        (f"{_line(count='x')}\n", "line 1: count 1 is 'x'"),
        (f"{_line(key='xyz')}\n", "line 1: id 1 is 'xyz'"),
        (f"{_line(key='f' * 17)}\n", "line 1: id 1"),
        ("", "is empty"),
    ],
)
def test_a_click_that_is_wrong_is_named_with_its_line(
    text: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=message):
        _criteo(tmp_path / "day", text)


def test_a_click_file_that_is_no_text_or_missing_is_named(tmp_path: Path) -> None:
    (tmp_path / "day").write_bytes(b"\xff\t\n")
    with pytest.raises(DataError, match="line 1 is not UTF-8"):
        CriteoConfig(type="criteo", train=str(tmp_path / "day")).build()
    with pytest.raises(DataError, match="cannot be read"):
        CriteoConfig(type="criteo", train=str(tmp_path / "night")).build()


def test_hash_size_0_is_refused() -> None:
    with pytest.raises(ValidationError, match="greater than or equal to 1"):
        CriteoConfig(type="criteo", train="day", hash_size=0)


def test_generated_clicks_follow_a_power_law_and_can_be_learned() -> None:
    config = ClicksConfig(type="clicks", fields=3, ids=1000, dense=2, examples=20_000)
    found = config.build()
    batch = take(found.train, np.arange(20_000))
    again = ClicksConfig(type="clicks", fields=3, ids=1000, dense=2, examples=50).build()
    np.testing.assert_array_equal(take(again.train, np.arange(50))["ids"], batch["ids"][:50])
    assert (take(found.heldout, np.arange(50))["ids"] != batch["ids"][:50]).any()
    assert batch["ids"].min() >= 0
    assert batch["ids"].max() < 1000
    counts = np.sort(np.bincount(batch["ids"][:, 0], minlength=1000))[::-1]
    # The ten most frequent of a thousand take 0.01^(1 - 0.9) = 63% of all.
    assert abs(counts[:10].sum() / 20_000 - 0.63) < 0.02
    frequent = np.argsort(np.bincount(batch["ids"][:, 0]))[-8:]
    rates = [batch["target"][batch["ids"][:, 0] == one].mean() for one in frequent]
    assert max(rates) - min(rates) > 0.2
