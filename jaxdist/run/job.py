"""A run of the command line as a strategy sees it: built, restored, and with its files open."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial

import jax
from rich.console import Console

from jaxdist.checkpoint.agree import broadcast_json
from jaxdist.checkpoint.layout import steps_present
from jaxdist.checkpoint.local import claim
from jaxdist.checkpoint.snapshots import Snapshots, whole_steps
from jaxdist.checkpoint.store import CheckpointStore
from jaxdist.config import Document, read, resolved_yaml
from jaxdist.errors import ConfigError, RunError
from jaxdist.experiment import Experiment, ExperimentConfig, TrainStage, build
from jaxdist.heartbeat.fence import RunFence
from jaxdist.mesh import Device
from jaxdist.metrics import goodput
from jaxdist.metrics.account import Account, Kind
from jaxdist.metrics.curve import plot_loss
from jaxdist.metrics.energy.tally import Tally
from jaxdist.metrics.progress import Progress
from jaxdist.metrics.writer import MetricsWriter, append, read_metrics
from jaxdist.run.agent_link import Watcher, continued, restored
from jaxdist.run.checkpoints import restore
from jaxdist.run.directory import RunDirectory, identity_of, prepare
from jaxdist.run.hooks.assemble import hooks_of, watching
from jaxdist.run.hooks.loop import Cadence
from jaxdist.run.loading.begin import begin_with, check_begin
from jaxdist.run.loading.misordered import check_order
from jaxdist.run.memory import check_state_fits, check_step_fits
from jaxdist.run.report.changes import changes
from jaxdist.run.report.describe import ModelFlops, describe, efficiency_of, tally_of
from jaxdist.run.report.goodput import print_goodput
from jaxdist.run.report.results import print_results
from jaxdist.run.termination import Termination
from jaxdist.run.watch.profile import Profile, ProfiledSteps
from jaxdist.run.watch.told import Goodput
from jaxdist.train.state import TrainState
from jaxdist.train.strategy.contract import Prepared
from jaxdist.types import Json, JsonObject


@dataclass
class RunJob:
    """A run in a directory that this process, or process 0, holds.

    Attributes:
      resume: whether it goes on from the newest checkpoint.
      profiled: the steps to trace.
      model_flops: asked once where the devices' peak is known, for the MFU; None measures none.
      seconds: how long it has run, without what prepared it.
      begun: what `time.perf_counter_ns` had where its time began to count; None is from the
        first preparation on.
      watcher: the agent that has started this process, if there is one.
      account: of this process's time since it was last prepared, or before that since `begun`.
      unmetered: why energy is not measured, where it is not.
      experiment: as it was built last.
      heldout: means of the last evaluation.
      kept: beside each state that is saved.
    """

    document: Document
    config: ExperimentConfig
    directory: RunDirectory
    termination: Termination
    resume: bool
    console: Console
    profiled: ProfiledSteps | None = None
    model_flops: ModelFlops | None = None
    seconds: float = 0.0
    begun: int | None = None
    watcher: Watcher | None = None
    account: Account = field(default_factory=Account)
    timed: Goodput | None = None
    unmetered: str | None = None
    experiment: Experiment | None = None
    heldout: Mapping[str, float] = field(default_factory=dict)
    kept: JsonObject = field(default_factory=dict)

    @contextmanager
    def prepared(self, devices: Sequence[Device] | None = None) -> Iterator[Prepared]:
        """See `jaxdist.train.strategy.contract.Job.prepared`."""
        self.account = account = self._new_account()
        self.experiment = experiment = build(self.config, self.document, devices=devices)
        self._check(experiment)
        tally = tally_of(experiment, self.document, account)
        self._begin_directory()
        describe(experiment, self.directory, tally, self.console)
        self.unmetered = tally if isinstance(tally, str) else None
        tally = tally if isinstance(tally, Tally) else None
        with ExitStack() as stack:
            store = stack.enter_context(self._store())
            memory = self._memory(stack)
            local = self._local(stack)
            state, metadata = self._begin(experiment, store, memory, local)
            start = int(state.step)
            if local is not None:
                local.forget(start if self.resume else -1)
            if self.config.elastic.batch == "rescale":
                self.experiment = experiment = continued(self, start, metadata, devices)
            traced = self.profiled and self.profiled.after(start, experiment.total_steps)
            writer, progress = self._open(experiment, start, stack)
            hooks, measured = hooks_of(self, experiment, store, writer, progress, metadata)
            more = [*watching(self, experiment, (memory, local), measured, writer, progress)]
            if writer is not None:
                more.append(self._timed(experiment, writer, start, tally, stack))
            if traced is not None:
                # The last hook, so that a trace begins after what else a boundary holds.
                more.append(self._profile(traced, progress, stack))
            hooks.hooks = [*hooks.hooks, *more]

            def enter(stage: TrainStage) -> None:
                progress.units_per_step = stage.batch_size * experiment.units_per_example
                if tally is not None:
                    tally.units_per_step = progress.units_per_step

            def record(step: int, values: Mapping[str, float]) -> None:
                if writer is not None:
                    writer.write(step, values, split="servers")

            begun = time.perf_counter()
            yield Prepared(
                state,
                experiment.stages,
                hooks,
                enter,
                optim=self.config.optim,
                directory=self.directory.path,
                note=progress.note,
                record=record,
                account=account,
            )
            account.switch(Kind.IDLE)
            with account.within(Kind.CHECKPOINT_BLOCKED):
                store.wait()
            self.seconds += time.perf_counter() - begun
        # Whoever enters again goes on, and traces no more.
        self.resume, self.profiled = True, None
        self.heldout = measured.heldout if measured is not None else {}

    def _check(self, experiment: Experiment) -> None:
        """What would end the run later ends it before its directory is begun."""
        with self.account.within(Kind.COMPILE):
            check_step_fits(experiment.program)
        if self.resume:
            return
        if self.profiled is not None:
            self.profiled.after(0, experiment.total_steps)
        if self.config.checkpoint.begin_with is not None:
            check_begin(experiment.program, self.config.checkpoint.begin_with)

    def _profile(self, traced: tuple[int, int], progress: Progress, stack: ExitStack) -> Profile:
        folder = self.directory.profile if jax.process_index() == 0 else None
        profile = Profile(*traced, folder, progress.note)
        stack.callback(profile.close)
        return profile

    def finish(self, step: int) -> None:
        """Tell how the run ended, after `step`, draw its curve, and tell where its time went."""
        self._admit()
        self._tell_end(step)
        if self.timed is not None:
            values = goodput.values_of(self.account, self.timed.life)
            append(self.directory.path, step, values, split=goodput.SPLIT)
            print_goodput(read_metrics(self.directory.path), self.console)
            if self.unmetered is not None:
                self.console.print(f"energy none: {self.unmetered}", soft_wrap=True, markup=False)

    def stopped_by(self, step: int) -> str | None:
        """What ended the run after `step`; None where that was its last."""
        assert self.experiment is not None, "a strategy prepares its job"
        return self.termination.signal if step < self.experiment.total_steps else None

    def _tell_end(self, step: int) -> None:
        experiment, console = self.experiment, self.console
        assert experiment is not None, "a strategy prepares its job"
        by = self.stopped_by(step)
        if by is not None:
            console.print(
                f"{by}: stopped after step {step} of {experiment.total_steps} "
                f"and saved a checkpoint; {self._going_on()}",
                soft_wrap=True,
            )
            return
        if jax.process_index() != 0:
            return
        baselines = experiment.baselines()
        plot_loss(
            read_metrics(self.directory.path),
            self.directory.curve,
            baselines,
            title=self.directory.path.name,
            loss_unit=experiment.loss_unit,
        )
        console.print(
            f"done   step {step} in {self.seconds:.0f} s; curve in {self.directory.curve}"
        )
        if self.heldout:
            unit = experiment.loss_unit
            print_results(self.heldout, baselines, loss_unit=unit, console=console)

    def _going_on(self) -> str:
        if self.config.checkpoint.parts is not None:
            return (
                "of a part of the state, which another run can begin with (checkpoint.begin_with)"
            )
        identity = self.directory.identity
        numbered = identity is not None and identity.asked not in (None, self.directory.path.name)
        # Beside others of its name --resume alone would not know which run is meant.
        which = f" run.directory={self.directory.path}" if numbered else ""
        return f"continue with the same command and --resume{which}"

    def _begin_directory(self) -> None:
        """Begin a new directory; of one that is resumed only say what differs from its config."""
        resolved = resolved_yaml(self.config)
        if self.directory.occupied:
            try:
                lines = changes(read(self.directory.config).values, resolved)
            except ConfigError as error:
                # The state is whole without it, and the config of this command replaces it.
                lines = [f"unknown, for {self.directory.config} is damaged: {error}"]
            for line in lines:
                text = f"changed since this run began: {line}"
                self.console.print(text, soft_wrap=True, markup=False)
        elif jax.process_index() == 0:
            prepare(self.directory, resolved)

    def _store(self) -> CheckpointStore:
        config = self.config.checkpoint
        return CheckpointStore(
            self.directory.checkpoints,
            keep=config.keep,
            keep_best=config.keep_best,
            chunk_bytes=config.chunk_bytes,
            on_event=lambda text: self.console.print(
                f"[bold red]checkpoint:[/] {text}", soft_wrap=True
            ),
            fence=self._fence,
        )

    @property
    def _fence(self) -> RunFence | None:
        return None if self.watcher is None else self.watcher.fence

    def _admit(self) -> None:
        """Raises where a later generation has begun."""
        if self._fence is not None:
            self._fence.check()

    def _memory(self, stack: ExitStack) -> Snapshots | None:
        """Snapshots in memory, where an agent keeps them."""
        if self.watcher is None or self.config.checkpoint.memory_every is None:
            return None
        say = partial(self.console.print, soft_wrap=True)
        return stack.enter_context(self.watcher.snapshots(say))

    def _local(self, stack: ExitStack) -> Snapshots | None:
        """Snapshots on this machine's disk."""
        config = self.config.checkpoint.local
        if config is None:
            return None
        folder = claim(config.directory, identity_of(self.directory))
        given = (folder, jax.process_index(), jax.process_count())
        say = partial(self.console.print, soft_wrap=True)
        return stack.enter_context(Snapshots(*given, say, lasts=True))

    def _begin(
        self,
        experiment: Experiment,
        store: CheckpointStore,
        memory: Snapshots | None,
        local: Snapshots | None,
    ) -> tuple[TrainState, Mapping[str, Json]]:
        """A fresh state, or that of the newest whole checkpoint, and what was kept beside it."""
        program = experiment.program
        check_state_fits(program.state_shapes)
        tiers = {} if memory is None else {"in memory": memory.folder}
        tiers |= {} if local is None else {"on this machine's disk": local.folder}
        if self.resume and tiers:
            say = partial(self.console.print, soft_wrap=True)
            found = restored(tiers, store, program.state_shapes, say)
            if found is not None:
                state, metadata, where = found
                say(f"resume from step {state.step} of {experiment.total_steps}, kept {where}")
                return state, metadata
        if self.resume and broadcast_json(bool(steps_present(store.directory))):
            say = partial(self.console.print, soft_wrap=True)
            saved = restore(store, program, say=say)
            check_order(self.directory, saved.step)
            say(f"resume from step {saved.step} of {experiment.total_steps}")
            return saved.state, saved.metadata
        if self.resume:
            self.console.print("resume: there is no checkpoint yet, so this run begins at step 0")
        begin = self.config.checkpoint.begin_with
        if begin is None:
            return program.init(), {}
        say = partial(self.console.print, soft_wrap=True)
        state, step = begin_with(program, begin, say=say)
        say(f"begin  with {', '.join(begin.parts)} of step {step} of {begin.run}")
        return state, {}

    def _open(
        self, experiment: Experiment, start: int, stack: ExitStack
    ) -> tuple[MetricsWriter | None, Progress]:
        """The file of metrics, on process 0, and the lines of progress."""
        primary, writer = jax.process_index() == 0, None
        if primary:
            # Not earlier: a resume that is refused leaves the run's own config as it was.
            prepare(self.directory, resolved_yaml(self.config))
            resumed = start if self.resume else None
            given = {"resume_step": resumed, "admit": self._admit}
            writer = stack.enter_context(MetricsWriter(self.directory.path, **given))
        unit = "tokens" if experiment.unit == "tokens" else "examples"
        given = (experiment.total_steps, start, unit, experiment.units_per_step, self.console)
        efficiency = efficiency_of(experiment, self.model_flops)
        progress = Progress(*given, enabled=primary, efficiency=efficiency)
        return writer, stack.enter_context(progress)

    def _new_account(self) -> Account:
        """From the process's start on where this is the first, else from now on."""
        restores = self.resume and bool(
            steps_present(self.directory.checkpoints)
            or (self.watcher is not None and whole_steps(self.watcher.place.snapshots))
            or self.config.checkpoint.local is not None
        )
        begun, self.begun = self.begun, None
        tell = None if self.watcher is None else self.watcher.publisher.phase
        return Account(Kind.RECOVERY if restores else Kind.START, begun=begun, tell=tell)

    def _timed(
        self,
        experiment: Experiment,
        writer: MetricsWriter,
        start: int,
        tally: Tally | None,
        stack: ExitStack,
    ) -> Goodput:
        """Writes where time and energy go, from now on until the files are closed."""
        cadence = Cadence(self.config.train.log_every, experiment.total_steps)
        life = goodput.next_life(read_metrics(self.directory.path)) if self.resume else 1
        self.timed = timed = Goodput(cadence, self.account, life, writer, start, tally)
        timed.write()

        def last() -> None:
            with suppress(RunError):  # what ends a run is told by itself
                timed.write()

        stack.callback(last)
        return timed
