"""The types of settings that several codecs have, with their validation."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator

from jaxdist.compression.wire import BITS


def checked_block(block: int) -> int:
    """Check the number of elements of a block, and return the number.

    The number must be a multiple of 8, so that the bits of a block's elements fill whole bytes.

    Raises:
      ValueError: the number is not a multiple of 8, or is outside of the range from 8 to 2^20.
    """
    if block % BITS or not 8 <= block <= 2**20:
        raise ValueError(
            f"a block of {block} elements is out of range: use a multiple of 8 from 8 to 1048576, "
            "such as 256"
        )
    return block


def checked_fraction(fraction: float) -> float:
    """Check the fraction of the elements to send, and return the fraction.

    Raises:
      ValueError: the fraction is not above 0 and at most 1.
    """
    if not 0 < fraction <= 1:
        raise ValueError(
            f"a fraction of {fraction:g} of the elements cannot be sent: use a fraction above 0 "
            "and at most 1, such as 0.01 for one element in a hundred"
        )
    return fraction


Block = Annotated[int, AfterValidator(checked_block)]
"""The number of elements that share a scale."""
Fraction = Annotated[float, AfterValidator(checked_fraction)]
"""The fraction of the elements to send."""
