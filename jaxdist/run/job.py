"""A run whose steps a strategy takes: its preparation, its open files and its end."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial

import jax
from rich.console import Console

from jaxdist.checkpoint.agree import gather_json
from jaxdist.checkpoint.layout import steps_present
from jaxdist.config import Document
from jaxdist.errors import RunError
from jaxdist.experiment import Experiment, ExperimentConfig, TrainStage, build
from jaxdist.mesh import Device
from jaxdist.metrics import goodput
from jaxdist.metrics.account import Account, Activity
from jaxdist.metrics.energy.tally import Tally
from jaxdist.metrics.progress import Progress
from jaxdist.metrics.writer import Records, read_metrics
from jaxdist.run.assemble import HookParts, hooks_of
from jaxdist.run.directory import directory_identity
from jaxdist.run.files import RunFiles
from jaxdist.run.hooks.calls import HookCalls
from jaxdist.run.hooks.contract import Outcome, Run
from jaxdist.run.hooks.loop import HeldOut, RunHooks
from jaxdist.run.loading.begin import check_begin
from jaxdist.run.loading.resume import beginning
from jaxdist.run.memory import check_step_fits
from jaxdist.run.report.describe import describe, efficiency_of, tally_of
from jaxdist.run.report.end import tell_end
from jaxdist.run.report.goodput import print_goodput
from jaxdist.run.termination import Termination
from jaxdist.run.tiers import open_tiers
from jaxdist.run.watch.profile import Profile, ProfiledSteps
from jaxdist.run.watch.reports import GoodputHook
from jaxdist.train.rescale import KEY, extended
from jaxdist.train.strategy.contract import Prepared
from jaxdist.types import Json, JsonObject


@dataclass
class RunLife:
    """An attempt of a run, from its preparation until its files are closed.

    Attributes:
      account: the account of the time that this attempt takes.
      energy: the tally of energy, or a text that gives the reason why there is no tally.
      kept: the metadata that is saved with each state, besides the best held-out loss.
      heldout: the results of the run's evaluations.
      timed: the hook that records time and energy in process 0, or None in other processes.
      seconds: the wall time of this attempt without its preparation, in seconds.
    """

    experiment: Experiment
    account: Account
    energy: Tally | str
    kept: JsonObject = field(default_factory=dict)
    heldout: HeldOut = field(default_factory=HeldOut)
    timed: GoodputHook | None = None
    seconds: float = 0.0


@dataclass
class RunJob:
    """A run in a directory that process 0 has locked.

    Attributes:
      resume: whether the run continues from its newest saved state.
      begun: the value of `time.perf_counter_ns` from which the account of time of the first attempt
        counts; None counts from the first preparation.
      profiled: the steps to trace in the first attempt of this process; None traces nothing.
      devices: the devices for strategies that do not choose devices themselves; None uses all
        devices.
      lives: the ended attempts of the run in this process; each call of `prepared` adds an attempt.
    """

    document: Document
    config: ExperimentConfig
    files: RunFiles
    termination: Termination
    calls: HookCalls
    console: Console
    resume: bool
    begun: int | None = None
    profiled: ProfiledSteps | None = None
    devices: Sequence[Device] | None = None
    lives: list[RunLife] = field(default_factory=list)

    @contextmanager
    def prepared(self, devices: Sequence[Device] | None = None) -> Iterator[Prepared]:
        """Build the run on `devices`, or on `self.devices`, and yield what a strategy needs.

        The run's files are open until the context ends.

        The method may be called again after the context has ended, even with other devices. The run
        then continues from its newest saved state, or from step 0 if no state was saved.

        Raises:
          JaxdistError: the run cannot be built on the devices, or no checkpoint can be trusted.
        """
        devices = self.devices if devices is None else devices
        resume = self.resume or bool(self.lives)
        account = self._new_account(resume=resume)
        experiment = build(self.config, self.document, devices=devices)
        self._check(experiment, account)
        life = RunLife(experiment, account, tally_of(experiment, self.document, account))
        self.files.begin()
        describe(experiment, self.files.directory, life.energy, self.console)
        say = partial(self.console.print, soft_wrap=True)
        with ExitStack() as stack:
            tiers = open_tiers(self.files, say, stack)
            given = experiment, self.files.directory, tiers, say
            state, metadata = beginning(*given, resume=resume)
            start, life.heldout.best = int(state.step), metadata.get("best")
            # The steps after `start` will be repeated, so the snapshots of later steps must not be
            # loaded.
            tiers.forget(start if resume else -1)
            if self.config.elastic.batch == "rescale":
                self._rescale(life, start, metadata, devices)
            experiment = life.experiment
            writer, progress = self._open(experiment, start, stack, resume=resume)
            parts = HookParts(
                experiment, self.files, tiers, account, self.termination, writer, progress,
                life.heldout, life.kept,
            )  # fmt: skip
            loop_hooks = [*hooks_of(parts), *self._users(experiment, start, progress)]
            hooks = RunHooks([*loop_hooks, *self._watching(life, parts, start, stack, resume)])
            begun = time.perf_counter()
            yield Prepared(
                state,
                experiment.stages,
                hooks,
                partial(_enter, life, progress),
                optim=self.config.optim,
                directory=self.files.directory.path,
                note=progress.note,
                record=partial(writer.write, split="servers"),
                account=account,
                rows=experiment.rows,
            )
            account.switch(Activity.IDLE)
            with account.within(Activity.CHECKPOINT_BLOCKED):
                tiers.store.wait()
            life.seconds = time.perf_counter() - begun
        self.lives.append(life)

    def finish(self, step: int) -> Outcome:
        """Print that the run ended after `step`, and how the run's time was used.

        The method also draws the loss curve of a run that took all steps or was ended by a hook.

        Returns:
          The step and the cause of the end, without the metrics.

        Raises:
          RunError: a later generation has started.
        """
        life, ending = self.lives[-1], self._ending(step)
        # `admit` raises an error in a generation that has been replaced: its processes must not
        # report an end or draw the curve.
        self.files.agent.admit()
        seconds = sum(life.seconds for life in self.lives)
        heldout = life.heldout.means
        tell_end(life.experiment, self.files.directory, ending, seconds, heldout, self.console)
        if life.timed is not None:
            values = goodput.account_values(life.account, life.timed.life)
            self.files.append(step, values, split=goodput.SPLIT)
            print_goodput(read_metrics(self.files.directory.path), self.console)
            if isinstance(life.energy, str):
                self.files.say(f"energy is not measured: {life.energy}")
        return ending

    def _ending(self, step: int) -> Outcome:
        if step >= self.lives[-1].experiment.total_steps:
            return Outcome(step, complete=True)
        # Only the process whose hook asked for the stop has the reason; the other processes only
        # received a SIGTERM.
        reasons = gather_json(self.termination.asked)
        asked = next((reason for reason in reasons if reason is not None), None)
        return Outcome(step, asked or self.termination.signal, complete=asked is not None)

    def _users(self, experiment: Experiment, start: int, progress: Progress) -> list[HookCalls]:
        """Start the user's hooks, if there are any, and return the loop hook that calls them."""
        directory = self.files.directory
        given = experiment, start, experiment.total_steps, progress.note, self.termination.ask
        self.calls.start(Run(directory_identity(directory).id, directory.path, *given))
        return [self.calls] if self.calls.hooks else []

    def _check(self, experiment: Experiment, account: Account) -> None:
        """Check, before the run creates its files, for errors that would end the run later."""
        starts = not self.resume and not self.lives
        if starts and self.config.checkpoint.begin_with is not None:
            check_begin(experiment.program, self.config.checkpoint.begin_with)
        with account.within(Activity.COMPILE):
            check_step_fits(experiment.program)
        if starts and self.profiled is not None:
            self.profiled.after(0, experiment.total_steps)

    def _rescale(
        self,
        life: RunLife,
        start: int,
        metadata: Mapping[str, Json],
        devices: Sequence[Device] | None,
    ) -> None:
        """Build the run again with the batch sizes of all attempts so far.

        The batch sizes determine the position in the data and the learning rate.

        Args:
          metadata: the metadata that was saved with the state, with the batch sizes of earlier
            attempts.
          devices: the devices of the mesh, or None for all devices.
        """
        train = self.config.train
        sizes = extended(metadata.get(KEY), start, train.batch_size, train.full_batch_size)
        life.kept = {KEY: [[*one] for one in sizes]}
        life.experiment = build(self.config, self.document, devices=devices, sizes=sizes)
        for line in life.experiment.explained if len(sizes) > 1 else ():
            self.console.print(line, soft_wrap=True)

    def _open(
        self, experiment: Experiment, start: int, stack: ExitStack, *, resume: bool
    ) -> tuple[Records, Progress]:
        """Open the metrics and the progress display; both do nothing except in process 0."""
        primary = jax.process_index() == 0
        writer = Records()
        if primary:
            given = start if resume else None, self.calls.record
            writer = stack.enter_context(self.files.metrics(*given))
        unit = "tokens" if experiment.unit == "tokens" else "examples"
        given = (experiment.total_steps, start, unit, experiment.units_per_step, self.console)
        efficiency = efficiency_of(experiment)
        progress = Progress(*given, enabled=primary, efficiency=efficiency)
        return writer, stack.enter_context(progress)

    def _new_account(self, *, resume: bool) -> Account:
        """Return an account of time for a new attempt.

        The account begins now or, in the first attempt, at `begun` if `begun` is set.

        Args:
          resume: whether the run is resumed. If a saved state may exist, the time until the first
            step then counts as recovery.
        """
        agent = self.files.agent
        restores = resume and bool(
            steps_present(self.files.directory.checkpoints)
            or agent.holds_snapshots
            or self.config.checkpoint.local is not None
        )
        begun = None if self.lives else self.begun
        kind = Activity.RECOVERY if restores else Activity.START
        return Account(kind, begun=begun, tell=agent.phase)

    def _watching(
        self, life: RunLife, parts: HookParts, start: int, stack: ExitStack, resume: bool
    ) -> Iterator[GoodputHook | Profile]:
        """Yield the hook that records time in process 0, and the hook that traces steps, if any.

        The first hook writes a record now, and its last record when `stack` closes.
        """
        primary = jax.process_index() == 0
        if primary:
            cadence = parts.every(self.config.train.log_every)
            records = read_metrics(self.files.directory.path) if resume else ()
            tally = life.energy if isinstance(life.energy, Tally) else None
            given = cadence, life.account, goodput.next_life(records), parts.writer, start
            life.timed = timed = GoodputHook(*given, tally)
            timed.write()

            def last() -> None:
                # An error of this last record must not replace the error that ends the run.
                with suppress(RunError):
                    timed.write()

            stack.callback(last)
            yield timed
        if self.profiled is not None and not self.lives:
            # This hook is the last, so that a trace begins only after the work of all other hooks.
            traced = self.profiled.after(start, life.experiment.total_steps)
            folder = self.files.directory.profile if primary else None
            profile = Profile(*traced, folder, parts.progress.note)
            stack.callback(profile.close)
            yield profile


def _enter(life: RunLife, progress: Progress, stage: TrainStage) -> None:
    """Set the number of units per step for rates and energy, at the start of a train stage."""
    progress.units_per_step = stage.batch_size * life.experiment.units_per_example
    if isinstance(life.energy, Tally):
        life.energy.units_per_step = progress.units_per_step
