"""Parameter servers: the wire, what comes in at each server, and runs with a slow worker."""

from __future__ import annotations

from jaxdist.bench.core.harness import REPEATS
from jaxdist.bench.core.report import Report


def bench(repeats: int = REPEATS, ray: str | None = None) -> Report:
    """Servers and workers on this machine, over loopback.

    Args:
      repeats: timed pairs of each figure.
      ray: a Python that has ray, jax and numpy: steps beside a parameter server of Ray's.
    """
    # Here, so that a list of all benches does not need the extra param-server.
    from jaxdist.bench.param_server import cluster, race, wire

    figures = [*wire.figures(repeats), cluster.traffic(), *cluster.slow_worker()]
    if ray is not None:
        figures += race.figures(ray)
    return Report("param-server", figures)
