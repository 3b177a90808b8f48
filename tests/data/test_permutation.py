from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxdist.data.permutation import permuted_examples


@given(length=st.integers(1, 400), seed=st.integers(0, 2**70), epoch=st.integers(0, 2**30))
def test_every_epoch_visits_each_example_once(length: int, seed: int, epoch: int) -> None:
    positions = np.arange(length) + epoch * length
    order = permuted_examples(positions, length=length, seed=seed)
    assert sorted(order.tolist()) == list(range(length))


@given(positions=st.lists(st.integers(0, 2**40), min_size=1, max_size=9))
def test_a_position_stands_for_itself(positions: list[int]) -> None:
    together = permuted_examples(np.array(positions), length=1000, seed=3)
    alone = [permuted_examples(np.array([p]), length=1000, seed=3)[0] for p in positions]
    assert together.tolist() == alone


def test_lengths_far_beyond_memory() -> None:
    order = permuted_examples(np.arange(10_000), length=2**61, seed=0)
    assert len(set(order.tolist())) == 10_000
    assert order.min() >= 0
    assert order.max() > 2**60


def test_epochs_and_seeds_differ() -> None:
    first, second = permuted_examples(np.arange(2000), length=1000, seed=0).reshape(2, -1)
    other = permuted_examples(np.arange(1000), length=1000, seed=1)
    for a, b in [(first, second), (first, other), (second, other), (first, np.arange(1000))]:
        assert (a == b).mean() < 0.02


def test_seed_and_epoch_do_not_stand_in_for_each_other() -> None:
    """Epoch 1 of seed 0 is not epoch 0 of seed 1, as it is where the two are added."""
    second = permuted_examples(np.arange(50, 100), length=50, seed=0)
    assert second.tolist() != permuted_examples(np.arange(50), length=50, seed=1).tolist()


@pytest.mark.parametrize("length", [2, 3, 5, 10, 50])
def test_each_example_is_as_likely_at_each_position(length: int) -> None:
    epochs = 4000
    orders = permuted_examples(np.arange(epochs * length), length=length, seed=0).reshape(
        epochs, length
    )
    counts = np.stack([np.bincount(column, minlength=length) for column in orders.T])
    expected = epochs / length
    chi_square = ((counts - expected) ** 2 / expected).sum()
    freedom = (length - 1) ** 2
    assert chi_square < freedom + 5 * np.sqrt(2 * freedom)


def test_three_examples_come_in_all_six_orders_equally_often() -> None:
    epochs = permuted_examples(np.arange(3 * 6000), length=3, seed=0).reshape(6000, 3)
    orders = Counter(map(tuple, epochs.tolist()))
    assert len(orders) == 6
    assert min(orders.values()) > 850


def test_the_order_is_pinned() -> None:
    """A run that is resumed with a later version reads the same examples."""
    assert permuted_examples(np.arange(8), length=100, seed=0).tolist() == [
        72,
        24,
        92,
        53,
        36,
        37,
        83,
        61,
    ]
