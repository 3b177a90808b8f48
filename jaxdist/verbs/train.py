"""`jaxdist train`: from a config file to a trained model in a run directory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import jax
from rich.console import Console
from rich.markup import escape

from jaxdist.checkpoint.agree import broadcast_json
from jaxdist.checkpoint.layout import steps_present
from jaxdist.checkpoint.store import CheckpointStore
from jaxdist.config import resolved_yaml
from jaxdist.data.cache import cache_directory
from jaxdist.errors import RunError
from jaxdist.experiment import Experiment, ExperimentConfig, build, load
from jaxdist.mesh import Device
from jaxdist.metrics.curve import plot_loss
from jaxdist.metrics.progress import Progress
from jaxdist.metrics.rates import Efficiency
from jaxdist.metrics.writer import MetricsWriter, read_metrics
from jaxdist.runtime import compilation_cache
from jaxdist.runtime.hardware import find_device
from jaxdist.train.checkpoints import restore, save
from jaxdist.train.directory import RunDirectory, prepare, take
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
    parse_profile,
)
from jaxdist.train.loop import run_loop
from jaxdist.train.memory import check_state_fits, check_step_fits, told_if_too_large
from jaxdist.train.misordered import check_order
from jaxdist.train.state import TrainState
from jaxdist.train.termination import Termination
from jaxdist.trees import tree_size
from jaxdist.types import Json
from jaxdist.verbs.compare import changes
from jaxdist.verbs.results import print_results

ModelFlops = Callable[[ExperimentConfig, Device], float]
"""Of a whole step of train.batch_size on such devices, nothing computed twice."""


def run(
    path: Path,
    overrides: Sequence[str] = (),
    *,
    resume: bool = False,
    profile: str | None = None,
    model_flops: ModelFlops | None = None,
    console: Console,
) -> RunDirectory:
    """Train as the config says; returns the run directory.

    Args:
      resume: continue the newest run of this config from its newest whole checkpoint.
      profile: steps to trace into the run directory, as `parse_profile` reads them.
      model_flops: asked once where the devices' peak is known, for the MFU; None measures none.
      console: where process 0 prints; the others are silent.

    Raises:
      JaxdistError: anything that the user can mend.
    """
    document, config = load(path, overrides)
    profiled = None if profile is None else parse_profile(profile)
    if jax.process_index() != 0:
        console = Console(quiet=True)
    elif jax.process_count() > 1:
        # A launcher may lend a terminal to each process and write all of them into one log.
        console = Console(file=console.file, force_terminal=False, highlight=False)
    say = partial(console.print, soft_wrap=True, markup=False)
    compilation_cache.enable(cache_directory() / "compiled")
    base, named = config.run.directory or Path("runs") / path.stem, bool(config.run.directory)
    with (
        _taken(base, named=named, resume=resume, say=say) as directory,
        Termination(say) as termination,
    ):
        experiment = build(config, document)
        check_step_fits(experiment.program)
        if profiled is not None and not resume:
            profiled.after(0, experiment.total_steps)  # before the directory is begun
        _begin_directory(directory, config, console)
        _describe(experiment, directory, console)
        efficiency = efficiency_of(experiment, model_flops)
        _train(
            experiment,
            directory,
            termination,
            resume=resume,
            profiled=profiled,
            efficiency=efficiency,
            console=console,
        )
    return directory


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


def _begin_directory(directory: RunDirectory, config: ExperimentConfig, console: Console) -> None:
    """Begin a new directory; of one that is resumed only say what differs from its own config."""
    resolved = resolved_yaml(config)
    if directory.occupied:
        for line in changes(directory.config.read_text(), resolved):
            console.print(f"changed since this run began: {line}", soft_wrap=True)
    elif jax.process_index() == 0:
        prepare(directory, resolved)


def _describe(experiment: Experiment, directory: RunDirectory, console: Console) -> None:
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


def _train(
    experiment: Experiment,
    directory: RunDirectory,
    termination: Termination,
    *,
    resume: bool,
    profiled: ProfiledSteps | None,
    efficiency: Efficiency | None,
    console: Console,
) -> None:
    config = experiment.config
    primary = jax.process_index() == 0
    with ExitStack() as stack:
        store = stack.enter_context(_store(config, directory, console))
        state, metadata = _begin(experiment, directory, store, resume=resume, console=console)
        start = int(state.step)
        steps = None if profiled is None else profiled.after(start, experiment.total_steps)
        writer = None
        if primary:
            # Not earlier: a resume that is refused leaves the run's own config as it was.
            prepare(directory, resolved_yaml(config))
            writer = MetricsWriter(directory.path, resume_step=start if resume else None)
            stack.enter_context(writer)
        progress = stack.enter_context(
            Progress(
                experiment.total_steps,
                start,
                "tokens" if experiment.unit == "tokens" else "examples",
                experiment.units_per_step,
                console,
                enabled=primary,
                efficiency=efficiency,
            )
        )
        hooks, measured = _hooks(experiment, store, writer, progress, termination, metadata)
        if steps is not None:
            folder = directory.profile if primary else None
            # The last hook, so that a trace begins after what else a boundary holds.
            profile = Profile(*steps, folder, progress.note)
            stack.callback(profile.close)
            hooks.hooks = [*hooks.hooks, profile]
        begun = time.perf_counter()
        state = _through_stages(experiment, state, hooks, progress)
        store.wait()
        seconds = time.perf_counter() - begun
    means = measured.heldout if measured is not None else {}
    _finish(experiment, directory, termination, means, int(state.step), seconds, console)


def _through_stages(
    experiment: Experiment, state: TrainState, hooks: RunHooks, progress: Progress
) -> TrainState:
    """The steps that are left, stage by stage, each from where its batches stand."""
    for stage in experiment.stages:
        start = int(state.step)
        if start >= stage.last_step or hooks.stopped:
            continue
        progress.units_per_step = stage.batch_size * experiment.units_per_example
        what = f"a step of {stage.batch_size} examples"
        batches = stage.loader.batches(start - stage.first_step)
        with told_if_too_large(what), batches:
            state = run_loop(
                stage.program.train, state, batches, hooks, start=start, stop=stage.last_step
            )
    return state


def _store(config: ExperimentConfig, directory: RunDirectory, console: Console) -> CheckpointStore:
    return CheckpointStore(
        directory.checkpoints,
        keep=config.checkpoint.keep,
        keep_best=config.checkpoint.keep_best,
        on_event=lambda text: console.print(f"[bold red]checkpoint:[/] {text}", soft_wrap=True),
    )


def _begin(
    experiment: Experiment,
    directory: RunDirectory,
    store: CheckpointStore,
    *,
    resume: bool,
    console: Console,
) -> tuple[TrainState, Mapping[str, Json]]:
    """A fresh state, or that of the newest whole checkpoint, and what was kept beside it."""
    program = experiment.program
    check_state_fits(program.state_shapes)
    if resume and broadcast_json(bool(steps_present(store.directory))):
        say = partial(console.print, soft_wrap=True)
        restored = restore(store, program, say=say)
        check_order(directory, restored.step)
        console.print(f"resume from step {restored.step} of {experiment.total_steps}")
        return restored.state, restored.metadata
    if resume:
        console.print("resume: there is no checkpoint yet, so this run begins at step 0")
    return program.init(), {}


def _hooks(
    experiment: Experiment,
    store: CheckpointStore,
    writer: MetricsWriter | None,
    progress: Progress,
    termination: Termination,
    metadata: Mapping[str, Json],
) -> tuple[RunHooks, Evaluate | None]:
    config, program, heldout = experiment.config, experiment.program, experiment.heldout

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
    hooks.append(Stop(termination))
    if program.outer is not None:
        hooks.append(Between(program.outer))
    if heldout is not None:
        best = metadata.get("best")
        measured = Evaluate(every(config.eval.every), held_out, progress, writer, best)
        hooks.append(measured)
    hooks.append(Save(every(config.checkpoint.every), saved, measured))
    return RunHooks(hooks), measured


def _finish(
    experiment: Experiment,
    directory: RunDirectory,
    termination: Termination,
    means: Mapping[str, float],
    step: int,
    seconds: float,
    console: Console,
) -> None:
    if termination.signal is not None and step < experiment.total_steps:
        console.print(
            f"{termination.signal}: stopped after step {step} of {experiment.total_steps} and "
            "saved a checkpoint; continue with the same command and --resume",
            soft_wrap=True,
        )
        return
    if jax.process_index() != 0:
        return
    baselines = experiment.dataset.baselines() if experiment.heldout is not None else {}
    plot_loss(
        read_metrics(directory.path),
        directory.curve,
        baselines,
        title=directory.path.name,
        loss_unit=f"nats per {experiment.unit[:-1]}",
    )
    console.print(f"done   step {step} in {seconds:.0f} s; curve in {directory.curve}")
    if means:
        print_results(means, baselines, unit=experiment.unit, console=console)
