"""Run a job by the strategy that its config names.

A strategy's config is data and lies in `train/strategy`; what runs it lies here.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

import jax

from jaxdist.errors import ConfigError, RunError, blamed
from jaxdist.metrics.account import Kind
from jaxdist.param_server import processes
from jaxdist.param_server.wire.ports import check_ports
from jaxdist.run.directory import RunDirectory
from jaxdist.run.job import RunJob
from jaxdist.run.memory import told_if_too_large
from jaxdist.run.suspect import SuspectStateError
from jaxdist.train.loop import run_loop
from jaxdist.train.state import TrainState
from jaxdist.train.strategy.config import ParameterServer, StrategyConfig
from jaxdist.train.strategy.contract import Prepared


def run_strategy(strategy: StrategyConfig, job: RunJob) -> TrainState:
    """Do what this process has to do for a job; return the last state that it knows.

    Raises:
      JaxdistError: anything that the user can mend.
    """
    return RUNNERS[strategy.type](strategy, job)


def all_steps(strategy: StrategyConfig, job: RunJob) -> TrainState:
    """Take every step of a run; where its state is suspect, from the newest checkpoint again.

    Recomputing is enough: what is wrong once on a device is rarely so a second time (arXiv
    2604.00726), and the same steps from the same state have the same bits.

    Raises:
      SuspectStateError: the run may not go back, or not again.
      RunError: what `through_stages` raises.
    """
    del strategy  # What it does between steps is part of the program.
    for restores in itertools.count():
        with job.prepared() as prepared:
            try:
                return through_stages(prepared)
            except SuspectStateError as error:
                error.check_restores(restores)
                prepared.note(f"going back: {error.what}")
        # The error is gone here, and with its frames the state that is wrong.
    raise AssertionError("unreachable: the count does not end")


def through_stages(prepared: Prepared) -> TrainState:
    """Take the steps that are left, stage by stage, and return the last state.

    Raises:
      RunError: a step does not fit the memory; whatever the hooks raise.
    """
    state, hooks, account = prepared.state, prepared.hooks, prepared.account
    for stage in prepared.stages:
        start = int(state.step)
        if start >= stage.last_step or hooks.stopped:
            continue
        prepared.enter(stage)
        # A process that has compiled waits in its first step for those that still compile.
        wait = jax.block_until_ready if jax.process_count() > 1 else None
        train = account.first(Kind.COMPILE, stage.program.train, wait)
        with (
            told_if_too_large(f"a step of {stage.batch_size} examples"),
            stage.loader.batches(start - stage.first_step) as batches,
            account.within(Kind.STEP),
        ):
            waited = account.each(Kind.INPUT_WAIT, batches)
            state = run_loop(train, state, waited, hooks, start=start, stop=stage.last_step)
    return state


def served(strategy: ParameterServer, job: RunJob) -> TrainState:
    """Start servers and workers, and take steps with them until the run ends.

    Raises:
      ConfigError: this process is one of several already.
      RunError: the wire is not installed; what `supervise` raises.
    """
    _check_installed()
    # They import gRPC, an extra.
    from jaxdist.param_server.training.state import Sharded
    from jaxdist.param_server.training.supervisor import supervise

    if jax.process_count() > 1:
        raise ConfigError(
            f"strategy.type parameter_server starts its own processes, and this is one of "
            f"{jax.process_count()}: start it once, without --processes or --coordinator",
            setting=("strategy", "type"),
        )
    with blamed("strategy"):
        given = strategy.processes.host, strategy.processes.port, strategy.servers
        check_ports(*given, aggregators=len(strategy.racks))
    with job.prepared() as prepared:
        assert prepared.optim is not None
        assert prepared.directory is not None
        program = prepared.stages[0].program
        placement = strategy.placed(program.model.params, prepared.optim)
        sharded = Sharded(strategy, program, prepared.optim, placement)
        config = RunDirectory(prepared.directory).config
        return supervise(sharded, prepared, module=processes.__name__, config=config)


def _check_installed() -> None:
    missing = [name for name in ("grpc", "google_crc32c") if find_spec(name) is None]
    if missing:
        raise RunError(
            f"strategy.type parameter_server needs {' and '.join(missing)} for its wire: "
            "pip install 'jaxdist[param-server]'"
        )


RUNNERS: Mapping[str, Callable[[Any, RunJob], TrainState]] = {
    "synchronous": all_steps,
    "lookahead": all_steps,
    "parameter_server": served,
}
"""`strategy.type` to what runs it."""
