"""Images on their way from a built-in source to a model."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxdist.config import Document, validate
from jaxdist.data import ImagesConfig, SyntheticConfig
from jaxdist.data.source import take
from jaxdist.errors import ConfigError, DataError

_MODULE = """
def double(batch, factor=2): return {**batch, "image": batch["image"].astype("f4") * factor}
def drops(batch): return {"image": batch["image"][:1]}
def none(batch): return None
def fails(batch): return batch["picture"]
"""
INDICES = np.array([5, 0, 3])


@pytest.fixture(autouse=True)
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "mytransform.py").write_text(_MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    sys.modules.pop("mytransform", None)


def digits(transform: Any = None) -> Any:
    values = {"type": "images", "source": "digits", "transform": transform}
    return validate(Document(values), ImagesConfig).build()


def own(name: str, **args: Any) -> dict[str, Any]:
    return {"type": "import", "path": f"mytransform:{name}", "args": args}


def test_images_are_bytes_by_themselves_and_0_to_1_when_scaled() -> None:
    plain, scaled = (take(digits(t).train, INDICES) for t in (None, {"type": "scale"}))
    assert (plain["image"].dtype, plain["image"].max()) == (np.uint8, 255)
    assert scaled["image"].dtype == np.float32
    np.testing.assert_allclose(scaled["image"], plain["image"] / np.float32(255), rtol=1e-6)
    np.testing.assert_array_equal(scaled["label"], plain["label"])


def test_both_splits_and_single_examples_are_transformed() -> None:
    plain, doubled = digits(), digits(own("double", factor=3))
    for split in ("train", "heldout"):
        before, after = (getattr(data, split)[4]["image"] for data in (plain, doubled))
        np.testing.assert_array_equal(after, before.astype(np.float32) * 3)
    assert len(doubled.train) == len(plain.train)


def test_channels_are_scaled_each_by_its_own_numbers() -> None:
    scale = {"type": "scale", "mean": [1, 2, 3], "std": [1, 2, 4]}
    settings = {"type": "synthetic", "kind": "images", "height": 2, "width": 2}
    values = [{**settings, "transform": t} for t in (None, scale)]
    built = [validate(Document(v), SyntheticConfig).build().train for v in values]
    before, after = (take(source, INDICES)["image"] for source in built)
    np.testing.assert_allclose(after, (before.astype(np.float32) - [1, 2, 3]) / [1, 2, 4])


@pytest.mark.parametrize(
    ("transform", "message"),
    [
        (
            {"type": "scale", "std": [1, 2]},
            "transform.std has 2 numbers, but images have 1 channels",
        ),
        (own("drops"), r"gave 'image' the shape \(1, 8, 8, 1\) for 3 examples"),
        (own("none"), "mytransform:none returned NoneType, expected a mapping"),
        (own("fails"), "data.transform mytransform:fails raised KeyError: 'picture'"),
    ],
)
def test_what_cannot_be_done(transform: dict[str, Any], message: str) -> None:
    with pytest.raises((DataError, ConfigError), match=message):
        take(digits(transform).train, INDICES)


def test_settings_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match=r"transform\.std = 0 "):
        digits({"type": "scale", "std": 0})
    tokens = Document({"type": "synthetic", "kind": "tokens", "transform": {"type": "scale"}})
    with pytest.raises(ConfigError, match="transform has no effect with kind 'tokens'"):
        validate(tokens, SyntheticConfig)
