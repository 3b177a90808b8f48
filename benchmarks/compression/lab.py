"""The time of train steps on slow links: each codec, its prediction, and torch's DDP.

The hosts run `host.py`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax

from benchmarks.compression import host
from benchmarks.compression.host import CODED, CODING, ONE_NUMBER, Task
from benchmarks.compression.step import ROWS, Contender, first_params
from benchmarks.core.harness import Sample
from benchmarks.core.hosts import Timed, on_hosts
from benchmarks.core.lab import Lab, LabLink
from jaxdist.collectives.cost import Level
from jaxdist.collectives.cost import predict_seconds as collective_seconds
from jaxdist.collectives.operations import XLA
from jaxdist.compression.cost import coding_bytes, predict
from jaxdist.errors import RunError
from jaxdist.runtime.hardware import Link

STEPS, WARMUP, REPEATS = 2, 2, 9
NOTHING = "nothing sent"
CODECS: Mapping[str, dict[str, str]] = {
    "float32": {"type": "whole"},
    "bfloat16": {"type": "cast"},
    "int8": {"type": "quantize"},
    "sign": {"type": "sign"},
    "top 1%": {"type": "topk"},
    "rank 4": {"type": "lowrank"},
}
FLAT = (
    Contender(NOTHING, None),
    *(Contender(name, codec) for name, codec in CODECS.items()),
)
PAIRED = (
    Contender(NOTHING, None),
    *(Contender(name, CODECS[name]) for name in ("float32", "sign")),
    *(
        Contender(f"{name}, exact inside", CODECS[name], inside=True)
        for name in ("float32", "bfloat16", "sign")
    ),
)
SLOW, FAST = LabLink(100e6), LabLink(1e9)


@dataclass(frozen=True)
class Found:
    """The results of one lab.

    Attributes:
      hosts: the lab.
      timed: the times of jaxdist's contenders and of torch's kinds, by name.
      predicted: for jaxdist's contenders, the seconds of a step.
      sent: for jaxdist's contenders, the bytes of a step by `compression.cost`.
    """

    hosts: Lab
    timed: Mapping[str, Timed]
    predicted: Mapping[str, float]
    sent: Mapping[str, float]

    def sample(self, name: str) -> Sample:
        """Return the seconds of a contender's steps."""
        return Sample(self.timed[name].seconds)

    @property
    def where(self) -> str:
        """The hosts and their link, for the names of figures."""
        per = self.hosts.hosts_per_site
        size = f"{self.hosts.sites} x {per}" if per > 1 else f"{self.hosts.sites}"
        return f"{size} hosts, {self.hosts.across.bits_per_s / 1e6:g} Mbit/s"


def measure(
    hosts: Lab,
    contenders: Sequence[Contender],
    torch: str | None,
    repeats: int = REPEATS,
    *,
    warmup: int = WARMUP,
    steps: int = STEPS,
) -> Found:
    """Time the contenders, and torch's if `torch` is given, in turn over all hosts of a lab.

    Raises:
      RunError: this machine cannot hold the lab, or a host fails.
    """
    peers = ("plain", "fp16", "powersgd") if torch else ()
    task = Task(hosts, tuple(contenders), peers, torch, ROWS, steps, warmup, repeats)
    timed = {one.name: one for one in on_hosts(hosts, host.measure, task)}
    check_losses(timed)
    seconds, sent = predictions(hosts, contenders, timed)
    return Found(hosts, timed, seconds, sent)


def check_losses(timed: Mapping[str, Timed]) -> None:
    """Raise RunError if the losses of float32 and of torch differ, because the networks differ."""
    ours, theirs = timed.get("float32"), timed.get("torch plain")
    if ours and theirs and not math.isclose(ours.loss, theirs.loss, rel_tol=1e-4):
        raise RunError(
            f"float32 has loss {ours.loss:.6f} and torch {theirs.loss:.6f} after as many steps: "
            "the two do not train the same network, so their times say nothing"
        )


def links(hosts: Lab, timed: Mapping[str, Timed]) -> tuple[Link, Link]:
    """Return the links between and inside sites, with the rate of `tc` and a measured latency."""
    steps = collective_seconds(XLA, "all_reduce", 0, [Level(hosts.size, Link(1.0, 1.0))])
    latency = statistics.median(timed[ONE_NUMBER].seconds) / steps
    across, inside = (
        Link(latency + link.delay_seconds, link.payload_bytes_per_s)
        for link in (hosts.across, hosts.inside)
    )
    return across, inside


def predictions(
    hosts: Lab, contenders: Sequence[Contender], timed: Mapping[str, Timed]
) -> tuple[dict[str, float], dict[str, float]]:
    """Predict the seconds and bytes of each contender's step.

    Three measurements are used: the step that sends nothing, the latency (by an all-reduce of one
    number) and the speed of coding (of int8). The bytes sent, and the numbers of passes and
    messages, are computed.
    """
    across, inside = links(hosts, timed)
    levels = [Level(hosts.sites, across), Level(hosts.hosts_per_site, inside)]
    compute = statistics.median(timed[NOTHING].seconds)
    seconds, sent = {NOTHING: compute}, {NOTHING: 0.0}
    for one in contenders:
        if one.choice is not None:
            found = predict(
                gradients(),
                one.choice,
                levels,
                bytes_per_second=coding_speed(timed),
                inside=one.inside,
            )
            seconds[one.name] = compute + found.seconds
            sent[one.name] = found.sent_bytes
    return seconds, sent


def coding_speed(timed: Mapping[str, Timed]) -> float:
    """Return the bytes of memory that a host's codec passes in a second, while all hosts encode."""
    return coding_bytes(gradients(), CODED) / statistics.median(timed[CODING].seconds)


def gradients() -> dict[str, dict[str, jax.ShapeDtypeStruct]]:
    """Return the shapes of the gradients of one host."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), first_params())
