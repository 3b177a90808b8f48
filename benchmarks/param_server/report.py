"""Parameter servers: the wire, what comes in at each server, and runs with a slow worker."""

from __future__ import annotations

from benchmarks.core.harness import REPEATS
from benchmarks.core.report import Report


def bench(repeats: int = REPEATS, ray: str | None = None, lab: bool = False) -> Report:
    """Servers and workers on this machine, over loopback.

    Args:
      repeats: timed pairs of each figure.
      ray: a Python that has ray, jax and numpy: steps beside a parameter server of Ray's.
      lab: in their place, on slow links: real step times beside the simulator's.
    """
    # Here, so that a list of all benches does not need the extra param-server.
    from benchmarks.param_server import cluster, kills, race, wire
    from benchmarks.param_server.lab import figures as on_slow_links

    if lab:
        return Report("param-server --lab", on_slow_links())
    figures = [
        *wire.figures(repeats),
        cluster.traffic(),
        cluster.racks(),
        *cluster.slow_worker(),
        kills.longest_stall(),
    ]
    if ray is not None:
        figures += race.figures(ray)
    return Report("param-server", figures)
