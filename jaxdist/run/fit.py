"""`jaxdist train`: from a config file to a trained model in a run directory."""

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
from jaxdist.errors import RunError
from jaxdist.experiment import load
from jaxdist.heartbeat.run_folder import run_folder_of
from jaxdist.run.agent_link import leaving, watched
from jaxdist.run.directory import RunDirectory, Taken, identity_of, take
from jaxdist.run.files import RunFiles
from jaxdist.run.job import ModelFlops, RunJob
from jaxdist.run.strategies import run_strategy
from jaxdist.run.termination import Termination
from jaxdist.run.watch.profile import parse_profile
from jaxdist.runtime import compilation_cache
from jaxdist.runtime.notices import heard


def run(
    path: Path,
    overrides: Sequence[str] = (),
    *,
    resume: bool = False,
    identity: Identity | None = None,
    profile: str | None = None,
    model_flops: ModelFlops | None = None,
    begun: int | None = None,
    stopped: Callable[[str], None] | None = None,
    console: Console,
) -> RunDirectory:
    """Train as the config says; returns the run directory.

    Args:
      resume: continue the run of this config from its newest whole checkpoint.
      identity: the run that is meant; None is a new one, or with `resume` the one that has begun.
      profile: steps to trace into the run directory, as `parse_profile` reads them.
      model_flops: asked once where the devices' peak is known, for the MFU; None measures none.
      begun: what `time.perf_counter_ns` had when the time of the run began to count: for a process
        that does nothing else `jaxdist.runtime.lifetime.begun`; None is now.
      stopped: called with what ended it, where that was before the last step, once all is saved.
      console: where process 0 prints; the others are silent.

    Raises:
      JaxdistError: anything that the user can mend.
    """
    begun = time.perf_counter_ns() if begun is None else begun
    document, config = load(path, overrides)
    profiled = None if profile is None else parse_profile(profile)
    if jax.process_index() != 0:
        console = Console(quiet=True)
    elif jax.process_count() > 1:
        # A launcher may lend a terminal to each process and write all of them into one log.
        console = Console(file=console.file, force_terminal=False, highlight=False, emoji=False)
    say = partial(console.print, soft_wrap=True, markup=False)
    compilation_cache.enable(cache_directory() / "compiled")
    run_folder = run_folder_of(os.environ)
    taking = partial(
        take,
        base_of(config.run.directory, path),
        named=bool(config.run.directory),
        resume=resume,
        exact=document.origin(("run", "directory")).overrides,
        run=identity,
        say=say,
    )
    with (
        _taken(taking) as (directory, goes_on),
        Termination(say, leaving(run_folder)) as termination,
        heard(config.run.preemption.build(say), termination.notice),
        watched(run_folder, identity_of(directory)) as agent,
    ):
        files = RunFiles(directory, config, agent, say)
        job = RunJob(
            document,
            config,
            files,
            termination,
            console,
            goes_on,
            begun,
            profiled,
            model_flops,
        )
        state = run_strategy(config.strategy, job)
        job.finish(int(state.step))
        by = job.stopped_by(int(state.step))
        if by is None:
            agent.done()
        elif stopped is not None:
            stopped(by)
    return directory


@contextmanager
def _taken(taking: Callable[[], Taken]) -> Iterator[tuple[RunDirectory, bool]]:
    """Hold the run's directory, by process 0 for all; all are refused alike.

    Yields the directory, and whether the run goes on with what it has saved.
    """
    with ExitStack() as stack:
        answer = None
        if jax.process_index() == 0:
            try:
                taken = taking()
                stack.enter_context(taken.lock)
                given = identity_of(taken.directory)
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
    """Refuse a path under which another machine sees another run: its disk is not shared."""
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
            or f"another process sees another run than {wanted} at {path}: give a directory that "
            "all machines share with run.directory=PATH"
        )
