"""The setting `parallel.deterministic`, which makes a run's bits independent of the devices."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from jaxdist.config.schema import Config


class StrictConfig(Config):
    """The guarantee of the same bits on different numbers of devices along mesh axis `data`.

    The number of devices must divide `shards`.
    """

    type: Literal["strict"]
    """The name that selects this guarantee in a config."""
    shards: Annotated[int, Field(ge=1, le=4096)] = 8
    """The number of logical shards into which each batch is divided by index, on any number of
    devices. Another number of shards gives other bits. With a power of two, the devices send the
    fewest bytes."""
