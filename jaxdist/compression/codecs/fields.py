"""Settings that several codecs share, with their validation."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator

from jaxdist.compression.wire import BITS


def checked_block(block: int) -> int:
    """Check that a block is a multiple of 8 elements, so that bits of its elements fill bytes.

    Raises:
      ValueError: the block is not a multiple of 8 from 8 to 2^20.
    """
    if block % BITS or not 8 <= block <= 2**20:
        raise ValueError(
            f"a block of {block} elements is out of range: give a multiple of 8 from 8 to 1048576, "
            "such as 256"
        )
    return block


def checked_fraction(fraction: float) -> float:
    """Check that a fraction of the elements is above 0 and at most 1.

    Raises:
      ValueError: the fraction is out of this range.
    """
    if not 0 < fraction <= 1:
        raise ValueError(
            f"a fraction of {fraction:g} of the elements cannot be sent: give more than 0 and at "
            "most 1, such as 0.01 for one in a hundred"
        )
    return fraction


Block = Annotated[int, AfterValidator(checked_block)]
"""Number of elements that share a scale."""
Fraction = Annotated[float, AfterValidator(checked_fraction)]
"""Fraction of the elements to send."""
