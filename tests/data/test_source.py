from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from jaxdist.data.source import ArraySource, narrow, take, take_one
from jaxdist.errors import DataError


def test_single_examples_are_stacked() -> None:
    examples: Any = [{"x": [1.0, 2.0], "y": 3}, {"x": [4.0, 5.0], "y": 6}]
    batch = take(examples, np.array([1, 0, 1]))
    assert batch["x"].dtype == np.float32
    assert batch["x"].tolist() == [[4, 5], [1, 2], [4, 5]]
    assert batch["y"].dtype == np.int32
    assert batch["y"].tolist() == [6, 3, 6]
    assert take(examples, np.array([], int))["x"].shape == (0, 2)


def test_arrays_give_single_examples_too() -> None:
    source = ArraySource(x=np.arange(6).reshape(3, 2), y=np.arange(3))
    assert len(source) == 3
    assert source[1]["x"].tolist() == [2, 3]
    assert take_one(source, 2)["y"] == 2
    with pytest.raises(IndexError, match="example 3 of 3"):
        take_one(source, 3)


@pytest.mark.parametrize(
    ("examples", "message"),
    [
        ([(1, 2)], r"example 0 is a tuple, expected a mapping.*\{'image': image"),
        ([{}], "example 0 is a dict, expected a mapping"),
        ([{"a": 1}, {"b": 1}], r"example 1 has the keys \['b'\], but example 0 has \['a'\]"),
        (
            [{"a": [1, 2]}, {"a": [1]}],
            r"'a' of example 1 is int32 \(1,\), but in example 0 it is int32 \(2,",
        ),
        ([{"a": 1}, {"a": 1.5}], r"'a' of example 1 is float32 \(\), but in example 0 it is int32"),
        ([{"a": "text"}], r"a\[0\] has dtype <U4, expected numbers"),
        ([{"a": 2**31}], r"a\[0\] holds 2147483648 to 2147483648"),
    ],
)
def test_examples_that_do_not_make_a_batch(examples: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        take(examples, np.arange(len(examples)))


def test_numbers_are_narrowed_but_never_changed() -> None:
    assert narrow("a", np.array([1, 2**31 - 1])).dtype == np.int32
    assert narrow("a", np.array([], np.int64)).dtype == np.int32
    assert narrow("a", np.array([1], np.uint8)).dtype == np.uint8
    with pytest.raises(DataError, match="a holds -2147483649 to 0"):
        narrow("a", np.array([0, -(2**31) - 1]))
