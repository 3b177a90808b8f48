"""Layouts of tensors: text between a file's order and ours, read lazily and written back."""

import numpy as np
import pytest

from jaxdist.errors import ConfigError
from jaxdist.interchange.layouts import WeightLayout

CASES = [
    ("V D", (7, 4), (7, 4), lambda x: x),
    ("V D -> D V", (7, 4), (4, 7), lambda x: x.T),
    ("(H d) D -> D H d", (6, 5), (5, 2, 3), lambda x: x.reshape(2, 3, 5).transpose(2, 0, 1)),
    ("D (H d) -> H d D", (5, 6), (2, 3, 5), lambda x: x.reshape(5, 2, 3).transpose(1, 2, 0)),
    (
        "D I i=2 j=3 -> (i=2 j=3 I) D",
        (5, 4, 2, 3),
        (24, 5),
        lambda x: x.transpose(2, 3, 1, 0).reshape(24, 5),
    ),
    # Pairs side by side become halves: rows 0 2 4 1 3 5 of each head.
    (
        "(H h 2) D -> D H (2 h)",
        (12, 5),
        (5, 2, 6),
        lambda x: x.reshape(2, 6, 5)[:, [0, 2, 4, 1, 3, 5]].transpose(2, 0, 1),
    ),
]


@pytest.mark.parametrize(("text", "file", "own", "right"), CASES, ids=[c[0] for c in CASES])
def test_reading_is_the_expression_and_filling_inverts_it(text, file, own, right):
    array, layout = np.arange(np.prod(file)).reshape(file), WeightLayout(text)
    assert layout.file_shape(own) == file
    found = layout.read(array, own)
    np.testing.assert_array_equal(found, right(array))
    back = np.zeros_like(array)
    layout.fill(back, found)
    np.testing.assert_array_equal(back, array)


def test_a_part_is_cut_out_of_a_joined_tensor():
    array = np.arange(5 * 18).reshape(5, 18)
    parts = [WeightLayout("D (3 H d) -> D H d", i) for i in range(3)]
    back = np.zeros_like(array)
    for i, layout in enumerate(parts):
        found = layout.read(array, (5, 2, 3))
        np.testing.assert_array_equal(found, array[:, 6 * i :][:, :6].reshape(5, 2, 3))
        layout.fill(back, found)
    np.testing.assert_array_equal(back, array)


def test_reading_takes_no_copy():
    array = np.zeros((6, 5))
    assert np.shares_memory(WeightLayout("(H d) D -> D H d").read(array, (5, 2, 3)), array)


@pytest.mark.parametrize("text", ["(H d", "H) d", "H d -> H", "H H", "H -> H d", "2 3 H -> H"])
def test_text_that_is_no_layout_is_refused(text):
    with pytest.raises(ValueError, match=r"parenthesis|the same dims"):
        WeightLayout(text)


def test_parameters_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="must give a size as a number"):
        WeightLayout("i=a")
    with pytest.raises(
        ConfigError, match=r"names 2 dims on the right, but the parameter has shape \(4,\)"
    ):
        WeightLayout("H d").file_shape((4,))
    with pytest.raises(ConfigError, match=r"does not fit a parameter of shape \(5,\)"):
        WeightLayout("(h 2) -> (2 h)").file_shape((5,))
