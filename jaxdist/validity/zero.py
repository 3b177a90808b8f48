"""The config of ZeRO, which the table of valid combinations reads and `parallel` carries out."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator

from jaxdist.compression import Adaptive, Cast, Quantize
from jaxdist.config.schema import Config

# A Literal would accept true and 1.0 as 1, since pydantic compares its values by equality.
Stage = Annotated[int, Field(ge=0, le=3)]
GatherCodec = Annotated[Cast | Quantize | Adaptive, Field(discriminator="type")]


class ZeroConfig(Config):
    """The split of the training state over the devices that share the batch."""

    stage: Stage = 0
    """The stage of ZeRO. 0 replicates everything, 1 splits the optimizer state, 2 also splits the
    gradients, and 3 also splits the parameters."""
    scope: Literal["all", "ici"] = "all"
    """The devices over which the state is split: all devices of the data axis (all), or the devices
    of each fast network, so that every fast network has a replica of the state (ici)."""
    whole_below: Annotated[int, Field(ge=0)] = 2048
    """The number of elements below which a tensor is not split, because splitting would save little
    memory and cost a message."""
    gather_dtype: Literal["bfloat16"] | None = None
    """The dtype in which stage 3 gathers parameters; null keeps the dtype of the parameters."""
    prefetch: bool = False
    """Whether stage 3 gathers the parameters of a layer while the previous layer computes. A device
    then holds the parameters of one more layer."""
    gather_codec: GatherCodec | None = None
    """The codec of the messages in which stage 3 gathers parameters. Each device keeps its exact
    shard; null sends parameters uncompressed."""
    offload: bool = False
    """Whether the optimizer's state of split parameters is in the host's memory. Each step copies
    it to the device and back, a group of parameters at a time."""
    offload_parameters: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """The patterns for the names of parameters that rest in the host's memory, in which `*` matches
    any characters. Each pass copies these parameters to the device, the parameters of blocks one
    layer at a time."""
    secondary: bool = False
    """Whether stage 3 gathers shards across the slow network only once per step. The forward and
    backward passes then gather inside the fast network, from a second copy that is kept for the
    step."""

    @field_validator("gather_codec")
    @classmethod
    def _same_each_time(cls, codec: GatherCodec | None) -> GatherCodec | None:
        if codec is not None and codec.unbiased:
            raise ValueError(
                "rounding stochastic would round the parameters differently for the forward and "
                "the backward pass: use nearest, which gives both passes the same parameters"
            )
        return codec
