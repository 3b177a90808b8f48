"""`parallel.deterministic`: what a run's bits may depend on."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from jaxdist.config.schema import Config


class StrictConfig(Config):
    """The same bits on any number of devices along data that divides `shards`."""

    type: Literal["strict"]
    """Selects this promise."""
    shards: Annotated[int, Field(ge=1, le=4096)] = 8
    """Pieces that each batch is cut into, by index, whatever the number of devices: part of what is
    computed, so that another number gives other bits. A power of two is sent with the fewest bytes.
    """
