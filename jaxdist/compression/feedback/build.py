"""The config section that chooses an error feedback by its `type`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from jaxdist.compression.feedback.classic import ErrorFeedback
from jaxdist.compression.feedback.compressed_momentum import CompressedMomentum
from jaxdist.compression.feedback.ef21 import Ef21
from jaxdist.compression.feedback.momentum import MomentumCorrection
from jaxdist.compression.feedback.none import NoFeedback

FeedbackConfig = Annotated[
    NoFeedback | ErrorFeedback | Ef21 | MomentumCorrection | CompressedMomentum,
    Field(discriminator="type"),
]
