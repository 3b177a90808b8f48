"""The warnings about settings that can be combined but interact."""

from __future__ import annotations

from collections.abc import Iterator

from jaxdist.optim.build import AdamWConfig, SgdConfig
from jaxdist.optim.common import OptimizerConfig
from jaxdist.optim.lamb import LambConfig
from jaxdist.optim.lars import LarsConfig
from jaxdist.param_server.consistency.arrival import OnArrival
from jaxdist.param_server.consistency.contract import Consistency


def consistency_notices(
    model: Consistency, optim: OptimizerConfig, workers: int
) -> tuple[str, ...]:
    """Return the warnings about a run's settings, as sentences."""
    if workers == 1 or not isinstance(model, OnArrival):
        return ()
    return (*_of_moments(model, optim, workers), *_of_reads(model))


def _of_moments(model: OnArrival, optim: OptimizerConfig, workers: int) -> Iterator[str]:
    kind = getattr(model, "type", "")
    if isinstance(optim, SgdConfig | LarsConfig) and optim.momentum:
        own = optim.momentum**workers
        yield (
            f"consistency type {kind} with optim.momentum {optim.momentum:g}: late gradients have "
            f"the effect of a momentum of about {1 - 1 / workers:.3g} with {workers} workers "
            "(arXiv 1605.09774). The optimizer's momentum is added to this effect, and decays "
            f"with each update, to {own:.3g} in a clock of all workers. Lower optim.momentum, or "
            "use bsp"
        )
    if isinstance(optim, AdamWConfig | LambConfig):
        yield (
            f"consistency type {kind} with optim.type {optim.type}: the optimizer's moments mix "
            f"gradients of older and newer parameters, and decay {workers} times in a clock of "
            "all workers. Adam suffers more from staleness than SGD does (Dai et al., arXiv "
            "1810.03264): use sgd without momentum, a small bound, or bsp"
        )


def _of_reads(model: OnArrival) -> Iterator[str]:
    how = model.how()
    if model.reuses and not model.ahead:
        more = ", and the copies that servers send in addition are not used" * model.publishes
        yield (
            f"consistency type {getattr(model, 'type', '')}: reads {how} acts like reads "
            "each_clock. A worker must read after each of its changes, since only the server's "
            f"optimizer can compute the changed parameters{more}. Use each_clock, or use ahead, "
            "so that a worker does not wait for answers"
        )
