from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from jaxdist.data import DataConfig, ImportConfig, TextConfig
from jaxdist.data.synthetic import SyntheticConfig
from jaxdist.errors import ConfigError, DataError

_MODULE = """
from jaxdist.data import SyntheticConfig

class Rows:
    def __init__(self, length=4, ragged=False):
        self.length, self.ragged = length, ragged
    def __len__(self):
        return self.length
    def __getitem__(self, index):
        return {"x": [index] * (index + 1 if self.ragged else 2)}

def one(length=4): return Rows(length)
def pair(): return Rows(4), Rows(2)
def ragged(): return Rows(ragged=True)
def none(): return None
def negative(): return Rows(-3)
def fractional(): return Rows(2.5)
def endless(): return Rows(2**70)
def whole(): return SyntheticConfig(kind="tokens", examples=3).build()
def fails(): return Rows()[0]["y"]
def failing_heldout(): return Rows(4), Rows(0)
listed = [{"x": 1}, {"x": 2}]
tuples = [(1, 2), (3, 4)]
"""


@pytest.fixture(autouse=True)
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "userdata.py").write_text(_MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    sys.modules.pop("userdata", None)


def _build(name: str, **settings: Any) -> Any:
    return ImportConfig(path=f"userdata:{name}", **settings).build()


def test_what_may_be_imported() -> None:
    one = _build("one", args={"length": 3}, classes=5)
    assert (len(one.train), one.heldout, one.classes) == (3, None, 5)
    pair = _build("pair")
    assert (len(pair.train), len(pair.heldout)) == (4, 2)
    assert "4 + 2 examples" in pair.description
    assert _build("whole").vocab_size == 257
    assert len(_build("listed").train) == 2


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("none", DataError, r"'userdata:none' gave a NoneType, expected an object with __len__"),
        ("ragged", DataError, r"'x' of example 3 is int32 \(4,\), but in example 0 it is int32 \("),
        ("tuples", DataError, "example 0 is a tuple, expected a mapping"),
        (
            "failing_heldout",
            DataError,
            "the held-out split of 'userdata:failing_heldout' is empty: it has 0 examples",
        ),
        ("negative", DataError, "the training split of .*negative' raised ValueError: __len__"),
        ("fractional", DataError, "__len__ of the training split .* raised TypeError: 'float'"),
        ("endless", DataError, "__len__ of the training split .* raised OverflowError: "),
        ("fails", ConfigError, r"raised KeyError: 'y' \(.*userdata\.py:20\)"),
        ("absent", ConfigError, "'userdata' has no attribute 'absent'"),
    ],
)
def test_what_may_not(name: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        _build(name)


def test_arguments_need_a_function() -> None:
    with pytest.raises(ConfigError, match="list object is not callable"):
        _build("listed", args={"a": 1})
    with pytest.raises(ConfigError, match="unexpected keyword argument 'depth'"):
        _build("one", args={"depth": 1})


def test_the_type_chooses_the_configuration() -> None:
    adapter = TypeAdapter(DataConfig)
    assert isinstance(adapter.validate_python({"type": "text"}), TextConfig)
    synthetic = adapter.validate_python({"type": "synthetic", "kind": "images"})
    assert isinstance(synthetic, SyntheticConfig)
    imported = adapter.validate_python({"type": "import", "path": "a:b"})
    assert isinstance(imported, ImportConfig)
    assert imported.args == {}
