"""Values outside what data declares, or not finite, are refused where a batch is read."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest

from jaxdist.data import ImportConfig
from jaxdist.data.loader import Loader
from jaxdist.data.source import ArraySource
from jaxdist.data.values import Allowed
from jaxdist.errors import DataError

LABEL, TOKENS = "a whole number from 0 to 9", "a whole number from 0 to 256"
ALLOWED = Allowed({"label": 10, "tokens": 257}, frozenset({"free"}))


class OneByOne(list):
    """Examples without the fast path."""


def _loader(source: Any, **options: Any) -> Loader:
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    options = {"sharding": lambda *_: place, "shuffle": False, "allowed": ALLOWED, **options}
    return Loader(source, batch_size=4, **options)


def _with(name: str, value: Any, dtype: Any = None, length: int = 12) -> dict[str, np.ndarray]:
    """Fields of which example 9 has one value that is not 1."""
    shapes = {"label": (), "tokens": (5,), "image": (2, 3), "mask": (), "free": ()}
    dtypes = {"label": np.int32, "tokens": np.int32, "mask": bool}
    arrays = {
        field: np.ones((length, *shape), dtypes.get(field, np.float32))
        for field, shape in shapes.items()
    }
    if dtype is not None:
        arrays[name] = arrays[name].astype(dtype)
    arrays[name][(9, *(-1 for _ in shapes[name]))] = value
    return arrays


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize(
    ("name", "value", "dtype", "message"),
    [
        ("label", 10, None, f"'label' of example 9 of the held-out split is 10, expected {LABEL}:"),
        ("label", -1, None, f"'label' of example 9 of the held-out split is -1, expected {LABEL}:"),
        ("label", 200, np.uint8, f"'label' .* is 200, expected {LABEL}"),
        ("label", 2.5, np.float32, f"'label' .* is 2.5, expected {LABEL}"),
        ("label", np.nan, np.float32, f"'label' .* is nan, expected {LABEL}"),
        ("tokens", 257, None, rf"'tokens'\[4\] of example 9 .* is 257, expected {TOKENS}"),
        ("tokens", 2**31 - 1, None, rf"'tokens'\[4\] .* is 2147483647, expected {TOKENS}"),
        ("tokens", -5, np.int64, rf"'tokens'\[4\] .* is -5, expected {TOKENS}"),
        ("image", np.nan, None, r"'image'\[1, 2\] of example 9 .* is nan, expected a finite numb"),
        ("image", -np.inf, np.float16, r"'image'\[1, 2\] .* is -inf, expected a finite number"),
        ("image", np.inf, ml_dtypes.bfloat16, r"'image'\[1, 2\] .* is inf"),
        ("image", 1e300, np.float64, r"'image'\[1, 2\] .* is inf"),
        ("image", complex(1, np.nan), np.complex64, r"'image'\[1, 2\] .* is \(?1\+nanj"),
    ],
)
def test_what_is_not_allowed_is_named(
    fast: bool, name: str, value: Any, dtype: Any, message: str
) -> None:
    arrays = ArraySource(**_with(name, value, dtype))
    source = arrays if fast else OneByOne(arrays[index] for index in range(len(arrays)))
    loader = _loader(source, split="held-out split")
    with loader.evaluation_batches() as batches:
        assert len(list(itertools.islice(batches, 2))) == 2
        with pytest.raises(DataError, match=message):
            next(batches)


@pytest.mark.parametrize(
    ("name", "value", "dtype"),
    [
        ("label", 9, None),
        ("label", 0, np.int8),
        ("label", 9.0, np.float32),
        ("tokens", 256, np.uint16),
        ("image", 65504, np.float16),  # whose sum overflows
        ("image", np.finfo(np.float32).max, None),
        ("image", 255, np.uint8),
        ("mask", False, None),
        ("free", np.nan, None),
        ("free", -1, np.int32),
    ],
)
def test_what_is_allowed_passes(name: str, value: Any, dtype: Any) -> None:
    with _loader(ArraySource(**_with(name, value, dtype))).evaluation_batches() as batches:
        assert len(list(batches)) == 3


def test_a_shuffled_batch_names_the_examples_own_number() -> None:
    loader = _loader(ArraySource(**_with("label", 77)), shuffle=True, seed=3)
    with loader.batches() as batches, pytest.raises(DataError, match="example 9 of the training"):
        list(itertools.islice(batches, 3))


def test_the_first_example_is_looked_at_before_any_batch() -> None:
    with pytest.raises(DataError, match="'label' of example 0 of the training split is 10"):
        _loader(ArraySource(label=np.full(4, 10)))


_MODULE = """
import numpy as np
from dataclasses import replace
from jaxdist.data import SyntheticConfig
from jaxdist.data.source import ArraySource

def split(label): return ArraySource(label=np.array([0, 0, label]), x=np.zeros(3, np.float32))
def pair(train=0, heldout=0): return split(train), split(heldout)
def whole(): return replace(SyntheticConfig(kind="tokens", examples=3).build(), vocab_size=None)
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


def test_imported_data_is_looked_at_at_both_ends() -> None:
    with pytest.raises(DataError, match="'label' of example 2 of the training split is 5"):
        _build("pair", classes=5, args={"train": 5})
    with pytest.raises(DataError, match="'label' of example 2 of the held-out split is -1"):
        _build("pair", classes=5, args={"heldout": -1})


def test_what_is_not_declared_or_not_checked_may_be_anything() -> None:
    assert _build("pair", args={"train": -100}).allowed == Allowed()
    passed = _build("pair", classes=5, args={"train": -100}, unchecked=["label"])
    assert passed.allowed == Allowed({"label": 5}, frozenset({"label"}))
    with pytest.raises(DataError, match=r"data.unchecked names labels, but .* \['label', 'x'\]"):
        _build("pair", unchecked=["labels"])


def test_a_whole_data_set_takes_what_the_configuration_declares() -> None:
    assert _build("whole").vocab_size is None
    assert _build("whole", vocab_size=300).vocab_size == 300
    with pytest.raises(DataError, match=r"'tokens'\[\d+\] of example 0 of the training split"):
        _build("whole", vocab_size=3)
