"""The settings of all models whose blocks have attention."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from jaxdist.config.schema import Count
from jaxdist.errors import ConfigError
from jaxdist.models.attention.choose import KernelName
from jaxdist.models.layers import ComputeDtype
from jaxdist.models.tuning.part import PartConfig


class TransformerConfig(PartConfig):
    """The settings that all models of transformer blocks have."""

    layers: Count
    """The number of transformer blocks."""
    embed: Count
    """The width of the residual stream."""
    norm_epsilon: Annotated[float, Field(gt=0)] = 1e-6
    """The number that norms add to a variance before they divide by the square root."""
    attention: KernelName = "auto"
    """The kernel of attention: plain (XLA's kernel, whose memory grows with the square of the
    sequence), blockwise (in blocks, with memory that grows linearly, on any device), splash (fused,
    for TPUs) or cudnn (fused, for GPUs and bfloat16). auto selects a fused kernel if one runs here,
    otherwise blockwise from 2048 positions on, and otherwise plain."""
    compute_dtype: ComputeDtype = "float32"
    """The dtype of activations and matmuls; parameters are float32."""
    scan_unroll: Count = 1
    """The number of blocks per iteration of the loop over layers. A larger number takes longer to
    compile and has less overhead."""

    @model_validator(mode="after")
    def _check_unroll(self) -> TransformerConfig:
        if self.scan_unroll > self.layers:
            raise ValueError(
                f"scan_unroll {self.scan_unroll} exceeds layers {self.layers}: use at most "
                f"{self.layers}"
            )
        return self


def check_positions(positions: int | None, length: int | None) -> None:
    """Check that a model has a learned position for each token of a sequence.

    Raises:
      ConfigError: the sequences have more tokens than the model has positions.
    """
    if positions is not None and (length or 0) > positions:
        raise ConfigError(
            f"sequences have {length} tokens, but model.positions is {positions}: "
            "lower data.window, or raise model.positions",
            setting=("positions",),
        )
