"""The bench of parameter servers: the wire, bytes into servers, slow and killed workers."""

from __future__ import annotations

from benchmarks.core.harness import REPEATS
from benchmarks.core.report import Report


def bench(repeats: int = REPEATS, ray: str | None = None, lab: bool = False) -> Report:
    """Measure servers and workers on this machine, over loopback.

    Args:
      repeats: timed pairs of each figure.
      ray: a Python that has ray, jax and numpy, to race against a parameter server of Ray.
      lab: whether to compare only step times on slow links, with the simulator.
    """
    # Imported here, so that the list of all benches does not need the extra param-server.
    from benchmarks.param_server import cluster, kills, race, replicated, secure, wire
    from benchmarks.param_server.lab import figures as on_slow_links

    if lab:
        return Report("param-server --lab", on_slow_links())
    figures = [
        *wire.figures(repeats),
        cluster.traffic(),
        cluster.racks(),
        *cluster.slow_worker(),
        kills.longest_stall(),
        *replicated.figures(),
        *secure.figures(),
    ]
    if ray is not None:
        figures += race.figures(ray)
    return Report("param-server", figures)
