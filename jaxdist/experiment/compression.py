"""The optimizer settings that compressed gradients need, and a line about the chosen codec."""

from __future__ import annotations

from jaxdist.collectives.algorithms.auto import label
from jaxdist.compression import Stages
from jaxdist.compression.config import CompressAuto, Compression
from jaxdist.optim.common import OptimizerConfig
from jaxdist.parallel.contract import Exchange
from jaxdist.parallel.exchange.compressed import Compressed
from jaxdist.parallel.exchange.strict import Strict


def with_compression(optim: OptimizerConfig, compression: Compression | None) -> OptimizerConfig:
    """Return the optimizer's settings with the changes that compressed gradients need.

    Args:
      optim: the settings in the config.
      compression: the settings of compressed gradients, or None for uncompressed gradients.
    """
    # Values that are not finite must not enter a residual, so such steps are skipped and counted.
    if compression is None or optim.skips:
        return optim
    return optim.model_copy(update={"skip_nonfinite": True})


def explain_exchange(compression: Compression | None, exchange: Exchange) -> tuple[str, ...]:
    """Return a line on the codec that `auto` selects, or on the order of strict sums, or ()."""
    if isinstance(exchange, Strict):
        return (exchange.explain(),)
    if not isinstance(compression, CompressAuto) or not isinstance(exchange, Compressed):
        return ()
    codec = exchange.messages.choice.otherwise
    named = codec.stages[-1].codec if isinstance(codec, Stages) else codec
    return (f"compression {label(named)} is predicted to be the fastest",)
