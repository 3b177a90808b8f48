"""The setting `parallel.deterministic`: what a run's bits may depend on."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from jaxdist.config.schema import Config


class StrictConfig(Config):
    """The same bits on every number of devices along data that divides `shards`."""

    type: Literal["strict"]
    """Selects this guarantee."""
    shards: Annotated[int, Field(ge=1, le=4096)] = 8
    """Number of pieces, by index, that each batch is cut into on any number of devices. It is part
    of the computation: another number gives other bits. A power of two sends the fewest bytes."""
