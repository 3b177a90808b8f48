"""Plans on slow links in real time: six plans of one model on four hosts, and their predictions.

A prediction simulates the plan's compiled program (`jaxdist.hlo.timeline`, as for TPUs) with the
measured speeds of the lab. Collectives are timed for each kind and payload that the programs have.
The work of a host is timed by a step that sends nothing, which all hosts take at the same time,
since they share the cores. These measurements take turns with the steps that are predicted, but a
prediction uses no time of these steps.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from benchmarks.core import lab
from benchmarks.core.hosts import on_hosts
from benchmarks.core.lab import Lab, LabLink
from benchmarks.core.report import Figure, Listing, Report, Sheet
from benchmarks.planner import lab_host
from benchmarks.planner.lab_host import Found, Task, Timed
from benchmarks.planner.lab_rates import SIZES
from benchmarks.planner.ranking import kendall_tau
from jaxdist.planner.plan import Plan

SPEEDS = (LabLink(100e6), LabLink(1e9))
HOSTS = 4
WARMUP, REPEATS = 1, 9
NEAR = 0.25
VALUES: Mapping[str, object] = {
    "model": {"type": "gpt", "layers": 4, "embed": 256, "heads": 4, "mlp": 1024},
    "data": {
        "type": "synthetic", "kind": "tokens", "vocab_size": 256, "window": 32,
        "examples": 64, "heldout_examples": 0,
    },
    "optim": {"type": "adamw", "learning_rate": 1e-3},
    "train": {"steps": 1, "batch_size": 4},
}  # fmt: skip
"""The config: many parameters and few tokens, so that links matter as much as computation."""
PLANS = (
    Plan(data=4, zero=0, remat="minimal"),
    Plan(data=4, zero=1, remat="minimal"),
    Plan(data=4, zero=3, remat="full"),
    Plan(data=2, tensor=2, zero=0, remat="minimal"),
    Plan(data=1, tensor=4, zero=0, remat="minimal"),
    Plan(stage=4, data=1, zero=0, remat="full", microbatches=4, schedule="1f1b"),
)


def bench(speeds: Sequence[LabLink] = SPEEDS) -> Report:
    """Measure and predict six plans at each speed of the links.

    If the lab cannot be built here, the bench is skipped, and the report has the reason.

    Raises:
      RunError: a host fails.
    """
    labs = [Lab(sites=HOSTS, across=speed) for speed in speeds]
    reason = lab.unavailable(labs[0])
    if reason:
        return Report("plan --lab", [Figure.skipped("slow-link lab", reason)])
    figures, listings = [], []
    for hosts in labs:
        found = measure(hosts)
        figures += figures_of(hosts, found)
        listings += [listing(hosts, found), probed(hosts, found)]
    return Report("plan --lab", figures, listings)


def measure(
    hosts: Lab, plans: Sequence[Plan] = PLANS, *, warmup: int = WARMUP, repeats: int = REPEATS
) -> Found:
    """Time and predict the plans on all hosts of a lab.

    Raises:
      RunError: this machine cannot hold the lab, or a host fails.
    """
    task = Task(dict(VALUES), tuple(plans), warmup, repeats)
    (found,) = on_hosts(hosts, lab_host.measure, task)
    return found


def _where(hosts: Lab) -> str:
    return f"{hosts.size} hosts, {hosts.across.bits_per_s / 1e6:g} Mbit/s"


def figures_of(hosts: Lab, found: Found) -> list[Figure]:
    """Return Kendall's tau of the plans, and the share of plans that is predicted within 25%."""
    timed = found.timed
    times = [statistics.median(one.seconds) for one in timed]
    tau = kendall_tau(times, [one.predicted for one in timed])
    near = [abs(one.predicted / real - 1) <= NEAR for one, real in zip(timed, times, strict=True)]
    note = (
        f"Kendall's tau of {len(timed)} plans' steps, predicted and measured; a host's work takes "
        f"{found.work_seconds * 1e3:.3g} ms"
    )
    return [
        Figure(f"ranking, {_where(hosts)}", tau, 0.8, ">= 1", "", note),
        Figure(
            f"within 25%, {_where(hosts)}", sum(near) / len(near), 1.0, ">= 1", "",
            "share of plans whose predicted step is as near to the measured one",
        ),
    ]  # fmt: skip


def listing(hosts: Lab, found: Found) -> Listing:
    """List each plan's step, measured and predicted."""
    sheet = Sheet[Timed](
        f"Plans on {_where(hosts)}",
        {
            "plan": "words",
            "measured": (lambda one: statistics.median(one.seconds), "s"),
            "predicted": ("predicted", "s"),
            "network": ("waits", "s"),
            "ratio": lambda one: one.predicted / statistics.median(one.seconds),
        },
    )
    return sheet(found.timed)


def _size(size_bytes: int) -> str:
    return f"{size_bytes} B" if size_bytes < 1024 else f"{size_bytes // 1024} KiB"


def probed(hosts: Lab, found: Found) -> Listing:
    """List the measured seconds of collectives by payload, outside of any plan."""
    columns = {"collective": "", **{_size(size): "s" for size in SIZES}}
    rows = [
        (f"{one.sort.kind} of {one.sort.group_size}", *map(one.at, SIZES)) for one in found.curves
    ]
    return Listing(f"A collective on {_where(hosts)}, by payload", columns, rows)
