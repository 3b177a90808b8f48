"""The functions that run a job: a function for each strategy that a config may name.

The configs of strategies are data, in `train/strategy`; this module runs them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

import jax

from jaxdist.errors import ConfigError, RunError, blamed
from jaxdist.metrics.account import Activity
from jaxdist.param_server import processes
from jaxdist.run.directory import RunDirectory
from jaxdist.run.job import RunJob
from jaxdist.run.memory import told_if_too_large
from jaxdist.run.suspect import SuspectStateError
from jaxdist.train.loop import run_loop
from jaxdist.train.state import TrainState
from jaxdist.train.strategy.config import Hybrid, ParameterServer, StrategyConfig
from jaxdist.train.strategy.contract import Prepared
from jaxdist.wire.config import address_here
from jaxdist.wire.ports import check_ports


def run_strategy(strategy: StrategyConfig, job: RunJob) -> TrainState:
    """Run this process's part of a job, and return the last state that this process has.

    Raises:
      JaxdistError: the run failed for a reason that the user can correct.
    """
    return RUNNERS[strategy.type](strategy, job)


def all_steps(strategy: StrategyConfig, job: RunJob) -> TrainState:
    """Take every step of a run, and return the last state.

    If the state is suspect, the run restarts from the newest checkpoint. A restart suffices, since
    a transient fault of a device rarely repeats (arXiv 2604.00726), and the same steps from the
    same state give the same bits.

    Raises:
      SuspectStateError: the state is suspect, and the run may not restart or has restarted too
        often.
      RunError: a step does not fit in memory; see `through_stages`.
    """
    del strategy  # The strategy's work between steps is part of the program.
    for restores in itertools.count():
        with job.prepared() as prepared:
            try:
                return through_stages(prepared)
            except SuspectStateError as error:
                error.check_restores(restores)
                prepared.note(f"going back: {error.what}")
        # The next attempt begins outside of `except`, so that the exception is released. Its frames
        # would keep the suspect state in memory.
    raise AssertionError("unreachable: the count does not end")


def through_stages(prepared: Prepared) -> TrainState:
    """Take the remaining steps, one train stage after another, and return the last state.

    Raises:
      RunError: a step does not fit in memory. Errors that hooks raise are passed on.
    """
    state, hooks, account = prepared.state, prepared.hooks, prepared.account
    for stage in prepared.stages:
        start = int(state.step)
        if start >= stage.last_step or hooks.stopped:
            continue
        prepared.enter(stage)
        # A process that compiles quickly waits for the other processes, and the account must not
        # count this wait as a step.
        wait = jax.block_until_ready if jax.process_count() > 1 else None
        train = account.first(Activity.COMPILE, stage.program.train, wait)
        with (
            told_if_too_large(f"a step of {stage.batch_size} examples"),
            stage.loader.batches(start - stage.first_step) as batches,
            account.within(Activity.STEP),
        ):
            waited = account.each(Activity.INPUT_WAIT, batches)
            state = run_loop(train, state, waited, hooks, start=start, stop=stage.last_step)
    return state


def served(strategy: ParameterServer, job: RunJob) -> TrainState:
    """Start parameter servers and workers, and train with them until the run ends.

    Return the last state.

    Raises:
      ConfigError: this process is already one of several processes of a run.
      RunError: a package for the communication with servers is not installed, or the training
        failed (see `jaxdist.param_server.training.supervisor.supervise`).
    """
    _check_installed(strategy.type)
    # These modules are imported here, since they import gRPC, an optional dependency.
    from jaxdist.param_server.training.state import Sharded
    from jaxdist.param_server.training.supervisor import supervise
    from jaxdist.train.strategy.statistics import with_statistics

    if jax.process_count() > 1:
        raise ConfigError(
            "strategy.type parameter_server starts its own processes, but this process is one of "
            f"{jax.process_count()}: run the command once, without --processes or --coordinator",
            setting=("strategy", "type"),
        )
    with blamed("strategy"):
        given = address_here(strategy.processes.host), strategy.processes.port, strategy.servers
        check_ports(*given, aggregators=len(strategy.racks))
    with job.prepared() as prepared:
        program = prepared.stages[0].program
        whole = with_statistics(program.model.params, program.model.buffers)
        placement = strategy.placed(whole, prepared.optim)
        sharded = Sharded(strategy, program, prepared.optim, placement)
        config = RunDirectory(prepared.directory).config
        return supervise(sharded, prepared, module=processes.__name__, config=config)


def hybrid(strategy: Hybrid, job: RunJob) -> TrainState:
    """Take every step of a run whose tables are on servers, which process 0 starts.

    Return the last state.

    Raises:
      RunError: a package is not installed, a server ended, or the training failed.
    """
    _check_installed(strategy.type)
    # These modules are imported here, since they import gRPC, an optional dependency.
    from jaxdist.tables.training.servers import with_tables

    with blamed("strategy"):
        given = address_here(strategy.processes.host), strategy.processes.port
        check_ports(*given, strategy.servers)
    with job.prepared() as prepared:
        checkpoints = RunDirectory(prepared.directory).checkpoints
        given = {"module": processes.__name__, "checkpoints": checkpoints}
        with with_tables(strategy, prepared, **given) as served:
            return through_stages(served)


def _check_installed(kind: str) -> None:
    missing = [name for name in ("grpc", "google_crc32c") if find_spec(name) is None]
    if missing:
        raise RunError(
            f"strategy.type {kind} needs {' and '.join(missing)} for its network connections: pip "
            "install 'jaxdist[param-server]'"
        )


RUNNERS: Mapping[str, Callable[[Any, RunJob], TrainState]] = {
    "synchronous": all_steps,
    "lookahead": all_steps,
    "hybrid": hybrid,
    "parameter_server": served,
}
"""The functions that run a job, by `strategy.type`."""
