"""The automatic choice of a codec, by the time that `cost.py` predicts for the links of a mesh."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from pydantic import field_validator

from jaxdist.collectives.algorithms.auto import Auto, LinkConfig, described_levels, label
from jaxdist.collectives.contract import Algorithm
from jaxdist.collectives.operations import XLA
from jaxdist.columns import aligned
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
"""The default candidates. With classic feedback and any optimizer, a run with these codecs trains
as well as a run without compression. Codecs with smaller messages need a feedback and an optimizer
that match the codec. If two candidates have equal times, the earlier candidate is chosen."""


class AutoCodec(Config):
    """The automatic choice of the codec with the least predicted time.

    The choice is made before a program is traced. The choice depends only on the shapes of the
    gradients, and on the sizes and links of the axes. Nothing is measured, so all processes make
    the same choice. `explain_candidates` shows the times.
    """

    type: Literal["auto"] = "auto"
    """The name that selects the automatic choice of a codec in a config."""
    candidates: tuple[CodecConfig, ...] = CANDIDATES
    """The codecs to choose from. If two codecs have equal predicted times, the earlier codec is
    chosen."""
    device: str | None = None
    """The device whose links are assumed (v5e, h100, ...); null means the device of the program."""
    fast: LinkConfig | None = None
    """The link of fast axes; null means the link that jaxdist knows for the device."""
    slow: LinkConfig | None = None
    """The link of slow axes; null means the link that jaxdist knows for the device."""
    slow_axes: tuple[str, ...] | None = None
    """The slow axes, between slices or hosts; null means the axes whose names end in `_dcn`."""

    @field_validator("candidates")
    @classmethod
    def _some(cls, candidates: tuple[CodecConfig, ...]) -> tuple[CodecConfig, ...]:
        if not candidates:
            raise ValueError("candidates is empty: name at least one codec, such as whole")
        return candidates

    @property
    def links(self) -> Auto:
        """An `Auto` algorithm with the links of these settings."""
        return Auto(device=self.device, fast=self.fast, slow=self.slow, slow_axes=self.slow_axes)


@dataclass(frozen=True)
class CodecCandidate:
    """A codec that the automatic choice compares with others, and its predicted cost.

    Attributes:
      codec: the codec that is compared.
      prediction: the predicted cost, or None if the codec cannot encode all gradients.
      refused: the reason why the codec cannot encode all gradients, or "".
    """

    codec: Codec
    prediction: Prediction | None
    refused: str = ""

    @property
    def seconds(self) -> float:
        """The predicted time in seconds, or infinity if the codec cannot encode all gradients."""
        return float("inf") if self.prediction is None else self.prediction.seconds


def with_whole_vectors(codec: CodecConfig) -> Choice:
    """Return a choice that uses `codec` for matrices and does not compress vectors."""
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
    """Return the candidate with the least predicted time.

    Args:
      choice: the settings of the automatic choice.
      leaves: the gradients of one device, or their shapes.
      sizes: the sizes of the axes over which gradients are summed, by name. The axis across the
        slowest network comes first.
      device_kind: the kind of the devices, as a short name or a `jax.Device.device_kind`. The
        argument is ignored if `choice.device` is not None.
      inside: whether gradients are first summed without compression over the last axis. Messages
        are then sent over the other axes only.
      algorithm: the algorithm of the collectives.
      choice_of: the function that receives a codec, and returns the choice of codecs for all
        parameters.

    Raises:
      CollectiveError: a link is neither configured nor known for the device.
      CompressionError: no candidate can encode all gradients; the message has the reason for each
        candidate.
    """
    found = candidates(
        choice, leaves, sizes, device_kind,
        inside=inside, algorithm=algorithm, choice_of=choice_of,
    )  # fmt: skip
    best = min(range(len(found)), key=lambda i: found[i].seconds)
    if found[best].prediction is None:
        reasons = "; ".join(one.refused for one in found)
        raise CompressionError(
            f"auto: no candidate can encode all gradients: {reasons}. Add a candidate that can, "
            "such as {type: cast}"
        )
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
    """Return all candidates with their predictions, in the order of `choice.candidates`.

    The arguments are the arguments of `resolve`.

    Raises:
      CollectiveError: a link is neither configured nor known for the device.
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
    """Format the speed of each link, and a table of the candidates, the fastest first.

    The arguments are the arguments of `resolve`.

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
    return "\n".join([*lines, *aligned(header, rows, left=[-1])])


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
