"""Gradient compression: codecs, error feedback, and an all-reduce that sends encoded gradients."""

from jaxdist.compression.choice import (
    CodecRule,
    PerParameter,
    Stage,
    Stages,
    sparsity_warm_up,
    warm_up,
)
from jaxdist.compression.codecs.adaptive import Adaptive
from jaxdist.compression.codecs.build import CodecConfig
from jaxdist.compression.codecs.cast import Cast
from jaxdist.compression.codecs.chain import Chain
from jaxdist.compression.codecs.lowrank import LowRank
from jaxdist.compression.codecs.quantize import Quantize
from jaxdist.compression.codecs.randomk import RandomK
from jaxdist.compression.codecs.sign import Sign
from jaxdist.compression.codecs.topk import TopK
from jaxdist.compression.codecs.whole import WholeCodec
from jaxdist.compression.contract import Codec, LinearCodec, Round, first_round
from jaxdist.compression.feedback.build import FeedbackConfig
from jaxdist.compression.feedback.classic import ErrorFeedback
from jaxdist.compression.feedback.compressed_momentum import CompressedMomentum
from jaxdist.compression.feedback.contract import Feedback
from jaxdist.compression.feedback.ef21 import Ef21
from jaxdist.compression.feedback.momentum import MomentumCorrection
from jaxdist.compression.feedback.none import NoFeedback
from jaxdist.compression.reduce import CompressionState, Reduced, compressed_all_reduce, init_state
from jaxdist.compression.sender import EncodedGradient, Sender, SenderState
from jaxdist.errors import CompressionError

__all__ = [
    "Adaptive",
    "Cast",
    "Chain",
    "Codec",
    "CodecConfig",
    "CodecRule",
    "CompressedMomentum",
    "CompressionError",
    "CompressionState",
    "Ef21",
    "EncodedGradient",
    "ErrorFeedback",
    "Feedback",
    "FeedbackConfig",
    "LinearCodec",
    "LowRank",
    "MomentumCorrection",
    "NoFeedback",
    "PerParameter",
    "Quantize",
    "RandomK",
    "Reduced",
    "Round",
    "Sender",
    "SenderState",
    "Sign",
    "Stage",
    "Stages",
    "TopK",
    "WholeCodec",
    "compressed_all_reduce",
    "first_round",
    "init_state",
    "sparsity_warm_up",
    "warm_up",
]
