"""A run of the command line as a strategy sees it: built, restored, and with its files open."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial

import jax
from rich.console import Console
from rich.markup import escape

from jaxdist.checkpoint.agree import broadcast_json
from jaxdist.checkpoint.layout import steps_present
from jaxdist.checkpoint.store import CheckpointStore
from jaxdist.config import Document, resolved_yaml
from jaxdist.experiment import Experiment, ExperimentConfig, TrainStage, build
from jaxdist.mesh import Device
from jaxdist.metrics.curve import plot_loss
from jaxdist.metrics.progress import Progress
from jaxdist.metrics.rates import Efficiency
from jaxdist.metrics.writer import MetricsWriter, read_metrics
from jaxdist.runtime.hardware import find_device
from jaxdist.train.checkpoints import restore, save
from jaxdist.train.directory import RunDirectory, prepare
from jaxdist.train.evaluate import evaluate
from jaxdist.train.hooks import (
    Between,
    Cadence,
    Evaluate,
    Guard,
    Hook,
    Log,
    Profile,
    ProfiledSteps,
    RunHooks,
    Save,
    Stop,
)
from jaxdist.train.memory import check_state_fits, check_step_fits
from jaxdist.train.misordered import check_order
from jaxdist.train.state import TrainState
from jaxdist.train.strategy.contract import Prepared
from jaxdist.train.termination import Termination
from jaxdist.trees import tree_size
from jaxdist.types import Json
from jaxdist.verbs.compare import changes
from jaxdist.verbs.results import print_results

ModelFlops = Callable[[ExperimentConfig, Device], float]
"""Of a whole step of train.batch_size on such devices, nothing computed twice."""


@dataclass
class RunJob:
    """A run in a directory that this process, or process 0, holds.

    Attributes:
      resume: whether it goes on from the newest checkpoint.
      profiled: the steps to trace.
      model_flops: asked once where the devices' peak is known, for the MFU; None measures none.
      seconds: how long it has run, without what prepared it.
      experiment: as it was built last.
      heldout: means of the last evaluation.
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
    experiment: Experiment | None = None
    heldout: Mapping[str, float] = field(default_factory=dict)

    @contextmanager
    def prepared(self, devices: Sequence[Device] | None = None) -> Iterator[Prepared]:
        """See `jaxdist.train.strategy.contract.Job.prepared`."""
        self.experiment = experiment = build(self.config, self.document, devices=devices)
        check_step_fits(experiment.program)
        if self.profiled is not None and not self.resume:
            self.profiled.after(0, experiment.total_steps)  # before the directory is begun
        self._begin_directory()
        describe(experiment, self.directory, self.console)
        with ExitStack() as stack:
            store = stack.enter_context(self._store())
            state, metadata = self._begin(experiment, store)
            start = int(state.step)
            traced = self.profiled and self.profiled.after(start, experiment.total_steps)
            writer, progress = self._open(experiment, start, stack)
            hooks, measured = self._hooks(experiment, store, writer, progress, metadata)
            if traced is not None:
                folder = self.directory.profile if jax.process_index() == 0 else None
                # The last hook, so that a trace begins after what else a boundary holds.
                profile = Profile(*traced, folder, progress.note)
                stack.callback(profile.close)
                hooks.hooks = [*hooks.hooks, profile]

            def enter(stage: TrainStage) -> None:
                progress.units_per_step = stage.batch_size * experiment.units_per_example

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
            )
            store.wait()
            self.seconds += time.perf_counter() - begun
        self.resume = True
        self.heldout = measured.heldout if measured is not None else {}

    def finish(self, step: int) -> None:
        """Tell how the run ended, after `step`, and draw its curve."""
        experiment, console = self.experiment, self.console
        assert experiment is not None, "a strategy prepares its job"
        if self.termination.signal is not None and step < experiment.total_steps:
            console.print(
                f"{self.termination.signal}: stopped after step {step} of {experiment.total_steps} "
                "and saved a checkpoint; continue with the same command and --resume",
                soft_wrap=True,
            )
            return
        if jax.process_index() != 0:
            return
        baselines = experiment.dataset.baselines() if experiment.heldout is not None else {}
        plot_loss(
            read_metrics(self.directory.path),
            self.directory.curve,
            baselines,
            title=self.directory.path.name,
            loss_unit=f"nats per {experiment.unit[:-1]}",
        )
        console.print(
            f"done   step {step} in {self.seconds:.0f} s; curve in {self.directory.curve}"
        )
        if self.heldout:
            print_results(self.heldout, baselines, unit=experiment.unit, console=console)

    def _begin_directory(self) -> None:
        """Begin a new directory; of one that is resumed only say what differs from its config."""
        resolved = resolved_yaml(self.config)
        if self.directory.occupied:
            for line in changes(self.directory.config.read_text(), resolved):
                self.console.print(f"changed since this run began: {line}", soft_wrap=True)
        elif jax.process_index() == 0:
            prepare(self.directory, resolved)

    def _store(self) -> CheckpointStore:
        config = self.config.checkpoint
        return CheckpointStore(
            self.directory.checkpoints,
            keep=config.keep,
            keep_best=config.keep_best,
            on_event=lambda text: self.console.print(
                f"[bold red]checkpoint:[/] {text}", soft_wrap=True
            ),
        )

    def _begin(
        self, experiment: Experiment, store: CheckpointStore
    ) -> tuple[TrainState, Mapping[str, Json]]:
        """A fresh state, or that of the newest whole checkpoint, and what was kept beside it."""
        program = experiment.program
        check_state_fits(program.state_shapes)
        if self.resume and broadcast_json(bool(steps_present(store.directory))):
            say = partial(self.console.print, soft_wrap=True)
            restored = restore(store, program, say=say)
            check_order(self.directory, restored.step)
            say(f"resume from step {restored.step} of {experiment.total_steps}")
            return restored.state, restored.metadata
        if self.resume:
            self.console.print("resume: there is no checkpoint yet, so this run begins at step 0")
        return program.init(), {}

    def _open(
        self, experiment: Experiment, start: int, stack: ExitStack
    ) -> tuple[MetricsWriter | None, Progress]:
        """The file of metrics, on process 0, and the lines of progress."""
        primary, writer = jax.process_index() == 0, None
        if primary:
            # Not earlier: a resume that is refused leaves the run's own config as it was.
            prepare(self.directory, resolved_yaml(self.config))
            resumed = start if self.resume else None
            writer = stack.enter_context(MetricsWriter(self.directory.path, resume_step=resumed))
        unit = "tokens" if experiment.unit == "tokens" else "examples"
        given = (experiment.total_steps, start, unit, experiment.units_per_step, self.console)
        efficiency = efficiency_of(experiment, self.model_flops)
        progress = Progress(*given, enabled=primary, efficiency=efficiency)
        return writer, stack.enter_context(progress)

    def _hooks(
        self,
        experiment: Experiment,
        store: CheckpointStore,
        writer: MetricsWriter | None,
        progress: Progress,
        metadata: Mapping[str, Json],
    ) -> tuple[RunHooks, Evaluate | None]:
        config, program, heldout = self.config, experiment.program, experiment.heldout

        def held_out(state: TrainState) -> dict[str, float]:
            assert heldout is not None
            with heldout.evaluation_batches(config.eval.batches) as batches:
                return evaluate(program, state.params, state.buffers, batches)

        def saved(state: TrainState, best: float | None, metric: float | None) -> None:
            save(store, program, state, metadata={"best": best}, metric=metric)

        def every(steps: int | None) -> Cadence:
            return Cadence(steps, experiment.total_steps)

        guard = Guard(program.metrics, store, program.optimizer.max_skipped)
        measured: Evaluate | None = None
        hooks: list[Hook] = [guard, Log(every(config.train.log_every), guard, progress, writer)]
        hooks.append(Stop(self.termination))
        if program.outer is not None:
            hooks.append(Between(program.outer, program.between))
        if heldout is not None:
            best = metadata.get("best")
            measured = Evaluate(every(config.eval.every), held_out, progress, writer, best)
            hooks.append(measured)
        hooks.append(Save(every(config.checkpoint.every), saved, measured))
        return RunHooks(hooks), measured


def efficiency_of(experiment: Experiment, model_flops: ModelFlops | None) -> Efficiency | None:
    """What MFU is measured by; None on CPU, and where the peak in the model's dtype is unknown."""
    device, config = experiment.layout.mesh.local_devices[0], experiment.config
    known = find_device(device.device_kind) if device.platform != "cpu" else None
    dtype = getattr(config.model, "compute_dtype", "float32")
    if model_flops is None or known is None or dtype not in known.flops_per_second:
        return None
    return Efficiency(
        experiment.unit,
        model_flops(config, device) / experiment.units_per_step,
        experiment.layout.mesh.devices.size,
        known.flops_per_second[dtype],
    )


def describe(experiment: Experiment, directory: RunDirectory, console: Console) -> None:
    """Say what is trained on what, and what was derived."""
    program, config = experiment.program, experiment.config
    devices = experiment.layout.mesh.devices
    shape = ", ".join(f"{axis}: {size}" for axis, size in experiment.layout.mesh.shape.items())
    kind = devices.flat[0].device_kind
    sizes = [stage.batch_size * experiment.units_per_example for stage in experiment.stages]
    amount = " to ".join(f"{size:,}" for size in sorted({min(sizes), max(sizes)}))
    console.print(f"data   {experiment.dataset.description}", soft_wrap=True)
    console.print(
        f"model  {config.model.type}, {tree_size(program.model.params):,} parameters; "
        f"{config.optim.type}, {experiment.total_steps:,} steps of "
        f"{amount} {experiment.unit}",
        soft_wrap=True,
    )
    for line in experiment.explained:
        console.print(f"plan   {line}", soft_wrap=True)
    for notice in experiment.notices:
        console.print(f"[bold yellow]warning:[/] {escape(notice)}", soft_wrap=True)
    console.print(f"mesh   {{{shape}}} on {devices.size} x {kind}", soft_wrap=True)
    console.print(f"run    {directory.path}", soft_wrap=True)
