"""The config section that chooses a codec by its `type`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from jaxdist.compression.codecs.adaptive import Adaptive
from jaxdist.compression.codecs.cast import Cast
from jaxdist.compression.codecs.chain import Chain
from jaxdist.compression.codecs.lowrank import LowRank
from jaxdist.compression.codecs.quantize import Quantize
from jaxdist.compression.codecs.randomk import RandomK
from jaxdist.compression.codecs.sign import Sign
from jaxdist.compression.codecs.topk import TopK
from jaxdist.compression.codecs.whole import WholeCodec

CodecConfig = Annotated[
    WholeCodec | Cast | Quantize | Adaptive | Sign | TopK | RandomK | LowRank | Chain,
    Field(discriminator="type"),
]
