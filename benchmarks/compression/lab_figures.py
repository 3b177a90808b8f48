"""Figures of train steps on slow links: gains, predictions, the choice of `auto`, torch's DDP."""

from __future__ import annotations

import sys

from benchmarks.compression.lab import (
    CODECS,
    FAST,
    FLAT,
    NOTHING,
    PAIRED,
    REPEATS,
    SLOW,
    Found,
    gradients,
    links,
    measure,
)
from benchmarks.core import lab
from benchmarks.core.hosts import Timed
from benchmarks.core.lab import Lab
from benchmarks.core.report import Figure, Listing, Report, Sheet, lacking
from jaxdist.collectives.algorithms.auto import LinkConfig, label
from jaxdist.compression import Cast, LowRank, Quantize, Sign, WholeCodec
from jaxdist.compression.auto import AutoCodec, resolve

MEASURED = (WholeCodec(), Cast(), Quantize(), Sign(), LowRank())
"""The codecs from which `auto` may choose."""
COUNTERPARTS = (("float32", "plain"), ("bfloat16", "fp16"), ("rank 4", "powersgd"))
"""Codecs of jaxdist, each with torch's kind that sends as many bytes."""
FURTHEST_GOAL, GAIN_GOAL, PEER_GOAL, AUTO_GOAL = "<= 1.2", ">= 5", "<= 1", "<= 1.1"
MISSING = "no torch here: pip install 'jaxdist[bench]', or give --torch a Python that has it"


def bench(torch: str | None = None, repeats: int = REPEATS) -> Report:
    """Measure four hosts at 100 Mbit/s and at 1 Gbit/s, and two pairs of hosts.

    The pairs have 1 Gbit/s inside and 100 Mbit/s between them. The bench is skipped, with the
    reason in the report, where the lab cannot be built.

    Args:
      torch: a Python that has torch; by default this Python, if it has torch.

    Raises:
      RunError: a host fails.
    """
    slow, fast = (Lab(sites=4, across=link) for link in (SLOW, FAST))
    pairs = Lab(sites=2, hosts_per_site=2, across=SLOW, inside=FAST)
    if reason := lab.unavailable(slow):
        return Report("compression --lab", [Figure.skipped("slow-link lab", reason)])
    torch = torch or (None if lacking("torch") else sys.executable)
    found = [measure(hosts, FLAT, torch, repeats) for hosts in (slow, fast)]
    between = measure(pairs, PAIRED, None, repeats)
    figures = [*gain_figures(found[0], found[1]), *pair_figures(between)]
    for one in found:
        figures += [*peer_figures(one, torch), *prediction_figures(one), auto_figure(one)]
    figures += prediction_figures(between)
    return Report("compression --lab", figures, [listing(one) for one in (*found, between)])


def gain_figures(slow: Found, fast: Found) -> list[Figure]:
    """Return how many times faster sign is than float32, on both links."""
    return [
        Figure.compare(
            f"float32 over sign, {one.where}",
            one.sample("float32"),
            one.sample("sign"),
            goal,
            "the whole step; 1.57 million parameters, 8 rows a host; slower than float32 are: "
            + (", ".join(slower(one)) or "none"),
        )
        for one, goal in ((slow, GAIN_GOAL), (fast, ""))
    ]


def slower(found: Found) -> list[str]:
    """Return the codecs whose step takes longer than float32's."""
    whole = found.sample("float32").median
    return [name for name in CODECS if found.sample(name).median > whole]


def pair_figures(found: Found) -> list[Figure]:
    """Compare messages that only sites exchange with messages between all hosts."""
    name = "sign, exact inside"
    note = f"{found.hosts.inside.bits_per_s / 1e9:g} Gbit/s inside a site"
    return [
        Figure.compare(
            f"{name} over {other}, {found.where}", found.sample(name), found.sample(other), "", note
        )
        for other in ("sign", "float32, exact inside", "float32")
    ]


def peer_figures(found: Found, torch: str | None) -> list[Figure]:
    """Compare jaxdist's codecs with torch's kinds that send as many bytes."""
    if torch is None:
        return [Figure.skipped(f"over torch, {found.where}", MISSING)]
    return [
        Figure.compare(
            f"{ours} over torch {theirs}, {found.where}",
            found.sample(ours),
            found.sample(f"torch {theirs}"),
            PEER_GOAL,
            "DistributedDataParallel over gloo, one thread a process"
            + ("; all gradients in one bucket" if theirs == "powersgd" else ""),
        )
        for ours, theirs in COUNTERPARTS
    ]


def prediction_figures(found: Found) -> list[Figure]:
    """Return the step whose time is furthest above or below its prediction."""
    ratios = {
        name: found.sample(name).median / seconds
        for name, seconds in found.predicted.items()
        if name != NOTHING
    }
    off = {name: max(ratio, 1 / ratio) for name, ratio in ratios.items()}
    worst = max(off, key=off.__getitem__)
    shown = ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items())
    note = f"{worst}; measured over predicted: {shown}"
    name = f"furthest from the prediction, {found.where}"
    return [Figure(name, off[worst], 1.0, FURTHEST_GOAL, "x", note)]


def auto_figure(found: Found) -> Figure:
    """Compare the step with the choice of `auto` with the fastest step of its candidates."""
    link, _ = links(found.hosts, found.timed)
    given = LinkConfig(latency_seconds=link.latency_seconds, bytes_per_second=link.bytes_per_second)
    auto = AutoCodec(fast=given, candidates=MEASURED)
    chosen = resolve(auto, gradients(), {"data": found.hosts.size}, "cpu")
    types = {codec["type"]: name for name, codec in CODECS.items()}
    mine = types[chosen.type]
    names = [types[codec.type] for codec in auto.candidates]
    best = min(names, key=lambda name: found.sample(name).median)
    return Figure.compare(
        f"auto over the fastest codec, {found.where}",
        found.sample(mine),
        found.sample(best),
        AUTO_GOAL,
        f"auto takes {label(chosen)}; the fastest of {', '.join(names)} is {best}",
    )


def listing(found: Found) -> Listing:
    """List the step of every contender."""
    whole = found.sample("float32").median
    sheet = Sheet[Timed](
        f"steps of training, {found.where}",
        {
            "": "name",
            "step": (lambda one: found.sample(one.name).median, "s"),
            "iqr": (lambda one: found.sample(one.name).iqr, "s"),
            "predicted": (lambda one: found.predicted.get(one.name), "s"),
            "sent": ("sent_bytes", "B"),
            "by formula": (lambda one: found.sent.get(one.name), "B"),
            "over float32": (lambda one: found.sample(one.name).median / whole, "x"),
        },
    )
    return sheet(list(found.timed.values()))
