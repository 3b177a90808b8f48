"""The training of a config in a run directory, for `jaxdist train` and `fit`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
from rich.console import Console

from jaxdist.checkpoint.agree import any_process, broadcast_json
from jaxdist.checkpoint.identity import Identity, base_of, check_identity, read_identity
from jaxdist.data.cache import cache_directory
from jaxdist.errors import STOPPED, RunError
from jaxdist.experiment import Source, load
from jaxdist.heartbeat.run_folder import run_folder_of
from jaxdist.mesh import Device
from jaxdist.run.agent_link import departure_reporter, watched
from jaxdist.run.directory import LockedDirectory, RunDirectory, directory_identity, take_directory
from jaxdist.run.files import RunFiles
from jaxdist.run.hooks.calls import HookCalls, check_hooks
from jaxdist.run.hooks.contract import Hook
from jaxdist.run.hooks.named import named_hooks
from jaxdist.run.job import RunJob
from jaxdist.run.report.fit_result import FitResult
from jaxdist.run.strategies import run_strategy
from jaxdist.run.termination import Termination
from jaxdist.run.watch.profile import parse_profile
from jaxdist.runtime import compilation_cache
from jaxdist.runtime.notices import heard

NAMELESS = Path("fit")
"""The name of the run directory of a config that does not come from a file."""


def train(
    source: Source,
    overrides: Sequence[str] = (),
    *,
    hooks: Sequence[Hook] = (),
    devices: Sequence[Device] | None = None,
    resume: bool = False,
    identity: Identity | None = None,
    profile: str | None = None,
    begun: int | None = None,
    console: Console,
) -> FitResult:
    """Train a config in this process, which must already have joined any other processes.

    Args:
      source: the config file or its content, as for `jaxdist.experiment.load`.
      hooks: the hooks that are called before the hooks that the config names.
      devices: the devices to use; None uses all devices.
      resume: whether to continue the run of this config from its newest complete checkpoint.
      identity: the identity of the run to take. None takes a new run or, with `resume`, the run
        that has begun under the config's name.
      profile: the steps to trace into the run directory, in the form that `parse_profile` parses,
        or None to trace none.
      begun: the value of `time.perf_counter_ns` from which the account of the run's time counts;
        None counts from now. A process that does nothing but train passes
        `jaxdist.runtime.lifetime.begun`.
      console: the console of process 0; other processes print nothing.

    Returns:
      The run that has ended, as this process sees it, with the experiment of the last attempt.

    Raises:
      JaxdistError: the run failed for a reason that the user can correct.
    """
    begun = time.perf_counter_ns() if begun is None else begun
    document, config = load(source, overrides)
    # Hooks are checked before a device is touched, and before the run has a directory.
    found = check_hooks([*hooks, *named_hooks(config, document)])
    profiled = None if profile is None else parse_profile(profile)
    if jax.process_index() != 0:
        console = Console(quiet=True)
    elif jax.process_count() > 1:
        # A launcher may give each process a terminal, although it writes the output of all
        # processes to a single log. The output therefore has no control sequences of terminals.
        console = Console(file=console.file, force_terminal=False, highlight=False, emoji=False)
    say = partial(console.print, soft_wrap=True, markup=False)
    run_folder = run_folder_of(os.environ)
    taking = partial(
        take_directory,
        base_of(config.run.directory, document.path or NAMELESS),
        named=bool(config.run.directory),
        resume=resume,
        exact=document.origin(("run", "directory")).overrides,
        run=identity,
        say=say,
    )
    with (
        compilation_cache.enabled(cache_directory() / "compiled"),
        _taken(taking) as (directory, goes_on),
        Termination(say, departure_reporter(run_folder)) as termination,
        heard(config.run.preemption.build(say), termination.notice),
        watched(run_folder, directory_identity(directory)) as agent,
    ):
        calls = HookCalls(found, termination.ask, say)
        files = RunFiles(directory, config, agent, say)
        job = RunJob(
            document, config, files, termination, calls, console, goes_on, begun, profiled, devices
        )
        with calls.ending():
            state = run_strategy(config.strategy, job)
            outcome = job.finish(int(state.step))
        calls.end(outcome)
        if outcome.complete:
            agent.done()
        code = 0 if outcome.complete else STOPPED
        experiment = job.lives[-1].experiment
        return FitResult(directory.path, experiment, state, outcome.stopped_by, code)


@contextmanager
def _taken(taking: Callable[[], LockedDirectory]) -> Iterator[tuple[RunDirectory, bool]]:
    """Lock the run's directory in process 0, for all processes, while the context is open.

    If process 0 raises an error, all processes raise this error.

    Yields the directory, and whether the run continues from its saved state.
    """
    with ExitStack() as stack:
        answer = None
        if jax.process_index() == 0:
            try:
                taken = taking()
                stack.enter_context(taken.lock)
                given = directory_identity(taken.directory)
                answer = {**given.plain, "asked": given.asked, "goes_on": taken.goes_on}
            except RunError as error:
                answer = {"refusal": str(error)}
        answer = broadcast_json(answer)
        if "refusal" in answer:
            raise RunError(answer["refusal"])
        identity = replace(Identity.of(answer), asked=answer["asked"])
        assert identity.path is not None
        _check_everywhere(identity.path, identity.id)
        yield RunDirectory(identity.path, identity), answer["goes_on"]


def _check_everywhere(path: Path, wanted: str) -> None:
    """Check that no machine has another run at a path, since the machines may not share a disk.

    Args:
      wanted: the id of the run.

    Raises:
      RunError: a process has found another run at the path.
    """
    problem = None
    if jax.process_index() != 0:
        try:
            if read_identity(path) is not None:
                check_identity(path, wanted)
        except RunError as error:
            problem = str(error)
    if any_process(problem is not None):
        raise RunError(
            problem
            or (
                f"another process found a different run at {path} than {wanted}: set "
                "run.directory=PATH to a directory that all machines share"
            )
        )
