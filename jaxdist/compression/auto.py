"""The choice of the codec with the least time that `cost.py` predicts for the given links."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from pydantic import field_validator

from jaxdist.collectives.algorithms.auto import (
    Auto,
    LinkConfig,
    aligned,
    described_levels,
    label,
)
from jaxdist.collectives.contract import Algorithm
from jaxdist.collectives.operations import XLA
from jaxdist.compression.choice import Choice, PerParameter
from jaxdist.compression.codecs.build import CodecConfig
from jaxdist.compression.codecs.cast import Cast
from jaxdist.compression.codecs.quantize import Quantize
from jaxdist.compression.codecs.whole import WholeCodec
from jaxdist.compression.contract import Codec
from jaxdist.compression.cost import Prediction, coding_bytes_per_second, predict
from jaxdist.config.schema import Config
from jaxdist.errors import CompressionError
from jaxdist.trees import tree_size
from jaxdist.types import Grads

CANDIDATES: tuple[CodecConfig, ...] = (WholeCodec(), Cast(), Quantize(), Quantize(bits=4))
"""Codecs that train as well as no compression, with classic feedback and any optimizer. Codecs with
smaller messages need a matching feedback and optimizer. Of candidates with equal times, the earlier
is chosen."""


class AutoCodec(Config):
    """The candidate with the least predicted time, chosen before the program is traced.

    The choice depends only on shapes, on the sizes of the axes and on their links. Nothing is
    measured, so that all processes make the same choice. `explain_candidates` shows the times.
    """

    type: Literal["auto"] = "auto"
    """Selects the automatic choice of a codec."""
    candidates: tuple[CodecConfig, ...] = CANDIDATES
    """Codecs to choose from; of two with equal predictions, the earlier is chosen."""
    device: str | None = None
    """Device whose figures to use (v5e, h100, ...); null uses those of the device compiled for."""
    fast: LinkConfig | None = None
    """Latency and bandwidth of the fast axes' link; null uses the device's own figures."""
    slow: LinkConfig | None = None
    """Latency and bandwidth of the slow axes' link; null uses the device's own figures."""
    slow_axes: tuple[str, ...] | None = None
    """Axes between slices or hosts, which have the slow link; null takes the axes whose name ends
    in `_dcn`."""

    @field_validator("candidates")
    @classmethod
    def _some(cls, candidates: tuple[CodecConfig, ...]) -> tuple[CodecConfig, ...]:
        if not candidates:
            raise ValueError("candidates is empty: name at least one codec, such as whole")
        return candidates

    @property
    def links(self) -> Auto:
        """The links of these settings, in the form that the choice of collectives uses."""
        return Auto(device=self.device, fast=self.fast, slow=self.slow, slow_axes=self.slow_axes)


@dataclass(frozen=True)
class CodecCandidate:
    """A codec and its prediction; the prediction is None where the codec cannot encode a leaf."""

    codec: Codec
    prediction: Prediction | None
    refused: str = ""

    @property
    def seconds(self) -> float:
        """The predicted time in seconds, infinite if the codec cannot encode a leaf."""
        return float("inf") if self.prediction is None else self.prediction.seconds


def with_whole_vectors(codec: CodecConfig) -> Choice:
    """Return a choice of `codec` for matrices, while vectors (norms, biases) are not compressed."""
    return PerParameter(otherwise=codec)


def resolve(
    choice: AutoCodec,
    leaves: Grads,
    sizes: Mapping[str, int],
    device_kind: str,
    *,
    inside: bool = False,
    algorithm: Algorithm = XLA,
    choice_of: Callable[[CodecConfig], Choice] = with_whole_vectors,
) -> CodecConfig:
    """Resolve an automatic choice to the codec with the least predicted time.

    Args:
      leaves: gradients of a single device, or their shapes.
      sizes: sizes of the axes over which gradients are summed, by name, slowest first.
      device_kind: kind of the devices, a short name or a `jax.Device.device_kind`; `choice.device`
        overrides it.
      inside: whether gradients are summed exactly over the last axis first, so that messages cross
        only the other axes.
      algorithm: algorithm of the collectives.
      choice_of: function from a codec to the choice for all parameters.

    Raises:
      CollectiveError: a link is neither configured nor known for the device.
      CompressionError: no candidate can encode all leaves; the message gives each reason.
    """
    found = candidates(
        choice, leaves, sizes, device_kind,
        inside=inside, algorithm=algorithm, choice_of=choice_of,
    )  # fmt: skip
    best = min(range(len(found)), key=lambda i: found[i].seconds)
    if found[best].prediction is None:
        reasons = "; ".join(one.refused for one in found)
        raise CompressionError(f"auto: no candidate can encode all gradients: {reasons}")
    return choice.candidates[best]


def candidates(
    choice: AutoCodec,
    leaves: Grads,
    sizes: Mapping[str, int],
    device_kind: str,
    *,
    inside: bool = False,
    algorithm: Algorithm = XLA,
    choice_of: Callable[[CodecConfig], Choice] = with_whole_vectors,
) -> list[CodecCandidate]:
    """Return every candidate with its prediction, in the order of the settings.

    Arguments and errors are those of `resolve`.
    """
    levels = choice.links.levels(sizes, device_kind)
    speed = coding_bytes_per_second(choice.device or device_kind)
    found = []
    for codec in choice.candidates:
        try:
            prediction = predict(
                leaves,
                choice_of(codec),
                levels,
                bytes_per_second=speed,
                inside=inside,
                algorithm=algorithm,
            )
        except CompressionError as error:
            found.append(CodecCandidate(codec, None, str(error)))
        else:
            found.append(CodecCandidate(codec, prediction))
    return found


def explain_candidates(
    choice: AutoCodec,
    leaves: Grads,
    sizes: Mapping[str, int],
    device_kind: str,
    *,
    inside: bool = False,
) -> str:
    """Format the speed of each link, and a table of the candidates with the fastest first.

    Arguments are those of `resolve`.

    >>> import jax
    >>> link = LinkConfig(latency_seconds=1e-3, bytes_per_second=1e7)
    >>> kernel = jax.ShapeDtypeStruct((1024, 1024), "float32")
    >>> candidates = AutoCodec(fast=link), kernel, {"data": 4}, "cpu"
    >>> print(explain_candidates(*candidates))  # doctest: +ELLIPSIS
    reduction of 1,048,576 gradients on {data: 4}
      data: 1000 us latency, 0.01 GB/s, switch
    ...
    """
    found = sorted(
        candidates(choice, leaves, sizes, device_kind, inside=inside), key=lambda one: one.seconds
    )
    levels = choice.links.levels(sizes, device_kind)
    lines = described_levels(f"reduction of {tree_size(leaves):,} gradients", sizes, levels)
    header = ("predicted", "of best", "wire", "coding", "sent bytes", "codec")
    rows = [_row(one, found[0].seconds) for one in found]
    return "\n".join([*lines, *aligned([header, *rows])])


def _row(one: CodecCandidate, best: float) -> tuple[str, ...]:
    found = one.prediction
    if found is None:
        return ("", "", "", "", "", f"{label(one.codec)}: {one.refused}")
    over = found.seconds / best if best else 1.0
    return (
        f"{found.seconds * 1e3:.2f} ms",
        f"{over:.2f}x",
        f"{found.wire_seconds * 1e3:.2f} ms",
        f"{found.coding_seconds * 1e3:.2f} ms",
        f"{found.sent_bytes:.0f}",
        label(one.codec),
    )
