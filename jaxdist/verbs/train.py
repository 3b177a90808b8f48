"""`jaxdist train`: from a config file to a trained model in a run directory."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import jax
from rich.console import Console

from jaxdist.checkpoint.agree import broadcast_json
from jaxdist.data.cache import cache_directory
from jaxdist.elastic.place import place_of
from jaxdist.errors import RunError
from jaxdist.experiment import load
from jaxdist.runtime import compilation_cache
from jaxdist.runtime.notices import heard
from jaxdist.train.directory import RunDirectory, take
from jaxdist.train.termination import Termination
from jaxdist.train.watch.profile import parse_profile
from jaxdist.verbs.job import ModelFlops, RunJob
from jaxdist.verbs.watched import leaving, watched


def run(
    path: Path,
    overrides: Sequence[str] = (),
    *,
    resume: bool = False,
    profile: str | None = None,
    model_flops: ModelFlops | None = None,
    begun: int | None = None,
    stopped: Callable[[str], None] | None = None,
    console: Console,
) -> RunDirectory:
    """Train as the config says; returns the run directory.

    Args:
      resume: continue the newest run of this config from its newest whole checkpoint.
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
        console = Console(file=console.file, force_terminal=False, highlight=False)
    say = partial(console.print, soft_wrap=True, markup=False)
    compilation_cache.enable(cache_directory() / "compiled")
    place = place_of(os.environ)
    base, named = config.run.directory or Path("runs") / path.stem, bool(config.run.directory)
    with (
        _taken(base, named=named, resume=resume, say=say) as directory,
        Termination(say, leaving(place)) as termination,
        heard(config.run.preemption.build(say), termination.notice),
        watched(place, directory.path) as watcher,
    ):
        job = RunJob(
            document,
            config,
            directory,
            termination,
            resume,
            console,
            profiled,
            model_flops,
            begun=begun,
            watcher=watcher,
            base=base,
        )
        state = config.strategy.run(job)
        job.finish(int(state.step))
        by = job.stopped_by(int(state.step))
        if by is None and watcher is not None:
            watcher.place.done.touch()
        if by is not None and stopped is not None:
            stopped(by)
    return directory


@contextmanager
def _taken(
    base: Path, *, named: bool, resume: bool, say: Callable[[str], None]
) -> Iterator[RunDirectory]:
    """The run's directory, held by process 0 for all; all are refused alike."""
    with ExitStack() as stack:
        answer = None
        if jax.process_index() == 0:
            try:
                directory, lock = take(base, named=named, resume=resume, say=say)
                stack.enter_context(lock)
                answer = {"path": str(directory.path)}
            except RunError as error:
                answer = {"refusal": str(error)}
        answer = broadcast_json(answer)
        if "refusal" in answer:
            raise RunError(answer["refusal"])
        yield RunDirectory(Path(answer["path"]))
