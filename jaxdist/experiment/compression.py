"""Checks that an optimizer and compressed gradients fit together."""

from __future__ import annotations

from jaxdist.collectives.algorithms.auto import label
from jaxdist.compression import CompressedMomentum, MomentumCorrection, Stages
from jaxdist.compression.config import CompressAuto, Compression
from jaxdist.errors import ConfigError
from jaxdist.optim.build import OptimConfig, SgdConfig
from jaxdist.optim.onebit import OnebitConfig
from jaxdist.parallel.contract import Exchange
from jaxdist.parallel.exchange.compressed import Compressed


def with_compression(optim: OptimConfig, compression: Compression | None) -> OptimConfig:
    """Adapt the optimizer's settings to compressed gradients.

    Raises:
      ConfigError: they do not fit together; the message says what to set in parallel.compression.
    """
    if compression is None:
        return optim
    feedback = compression.feedback
    if isinstance(feedback, MomentumCorrection):
        _check_no_momentum(optim)
    elif isinstance(feedback, CompressedMomentum):
        _check_linear(optim, feedback.b1)
    if isinstance(optim, OnebitConfig):
        _check_onebit(optim, compression)
    # Values that are not finite must not enter a residual: such steps are skipped, and counted.
    return optim if optim.skips else optim.model_copy(update={"skip_nonfinite": True})


def explain_messages(compression: Compression | None, exchange: Exchange) -> tuple[str, ...]:
    """Describe the choice of `auto` in a line; empty where the config names the codec."""
    if not isinstance(compression, CompressAuto) or not isinstance(exchange, Compressed):
        return ()
    codec = exchange.messages.choice.otherwise
    named = codec.stages[-1].codec if isinstance(codec, Stages) else codec
    return (f"compression {label(named)} is predicted to be the fastest",)


def _check_no_momentum(optim: OptimConfig) -> None:
    own = getattr(optim, "momentum", getattr(optim, "b1", 0))
    if own:
        raise ConfigError(
            f"error_feedback momentum with optim.type {optim.type}, which has momentum {own:g} of "
            "its own: momentum would count twice; set optim: {type: sgd, momentum: 0} (or b1: 0), "
            "or error_feedback: true",
            setting=("error_feedback",),
        )


def _check_linear(optim: OptimConfig, b1: float) -> None:
    """Refuse an optimizer that is not linear in the gradient: only sums recover lost parts."""
    own = optim.b1 if isinstance(optim, OnebitConfig) else getattr(optim, "momentum", None)
    if not isinstance(optim, OnebitConfig | SgdConfig):
        raise ConfigError(
            f"error_feedback compressed_momentum with optim.type {optim.type}, whose step is not "
            "linear in the gradients that it gives; set optim.type: onebit_adam, onebit_lamb or "
            "sgd, or error_feedback: true",
            setting=("error_feedback",),
        )
    if own != b1:
        raise ConfigError(
            f"error_feedback compressed_momentum with b1 {b1:g}, and optim.type {optim.type} with "
            f"{own:g}: both are the decay of one momentum; set them to the same",
            setting=("error_feedback",),
        )


def _check_onebit(optim: OnebitConfig, compression: Compression) -> None:
    if not isinstance(compression.feedback, CompressedMomentum):
        raise ConfigError(
            f"optim.type {getattr(optim, 'type', '')} needs its momentum compressed, not the "
            f"gradient: set error_feedback: {{type: compressed_momentum, b1: {optim.b1:g}}}",
            setting=("error_feedback",),
        )
    if compression.warmup_steps != optim.freeze_step:
        raise ConfigError(
            f"warmup_steps {compression.warmup_steps} with optim.freeze_step {optim.freeze_step}: "
            "the second moment is frozen when compression begins; set both to the same",
            setting=("warmup_steps",),
        )
