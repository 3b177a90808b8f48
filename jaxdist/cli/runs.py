"""Commands that train, and that use what was trained."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

import typer

from jaxdist.cli import shared
from jaxdist.runtime.rendezvous import JOIN_SECONDS

if TYPE_CHECKING:
    from jaxdist.experiment import ExperimentConfig
    from jaxdist.mesh import Device


def train(
    config: shared.ConfigFile,
    overrides: shared.Overrides = None,
    *,
    devices: shared.Devices = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue from the newest whole checkpoint.")
    ] = False,
    profile: Annotated[
        str | None,
        typer.Option(
            metavar="STEPS",
            help="Trace steps for xprof and Perfetto: 10:13 the 10th to the 13th, 4 the first "
            "four after a warm-up.",
        ),
    ] = None,
    coordinator: shared.Coordinator = None,
    num_processes: shared.NumProcesses = None,
    process_id: shared.ProcessId = None,
    distributed: shared.Detect = False,
    join_timeout: shared.JoinTimeout = JOIN_SECONDS,
) -> None:
    """Train as CONFIG says."""
    extra = shared.prepare(config, overrides, devices)
    from jaxdist.runtime.connection import connected
    from jaxdist.runtime.processes import find_processes
    from jaxdist.verbs.train import run

    processes = find_processes(
        os.environ,
        coordinator=coordinator,
        count=num_processes,
        index=process_id,
        detect=distributed,
    )
    with connected(processes, shared.report, seconds=join_timeout):
        run(
            config,
            extra,
            resume=resume,
            profile=profile,
            model_flops=_model_flops,
            console=shared.console(),
        )


def _model_flops(config: ExperimentConfig, device: Device) -> float:
    from jaxdist.inspect.ideal import model_flops  # only where a device's peak is known

    return model_flops(config, device)


def evaluate(
    run: shared.Run,
    overrides: shared.Overrides = None,
    *,
    step: shared.CheckpointStep = None,
    devices: shared.Devices = None,
) -> None:
    """Evaluate a run's checkpoint on the whole held-out split."""
    extra = shared.prepare(run / "config.yaml", overrides, devices)
    from jaxdist.verbs.evaluate import evaluate_run

    evaluate_run(run, extra, step=step, console=shared.console())


def generate(
    run: shared.Run,
    overrides: shared.Overrides = None,
    *,
    prompt: Annotated[str, typer.Option(help="Text to continue.")],
    tokens: Annotated[int, typer.Option(min=1, help="Number of tokens to add.")] = 256,
    temperature: Annotated[
        float, typer.Option(min=0, help="0 takes the likeliest token each time.")
    ] = 0.8,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the random choices.")] = 0,
    step: shared.CheckpointStep = None,
    devices: shared.Devices = None,
) -> None:
    """Continue a prompt with a run's language model."""
    extra = shared.prepare(run / "config.yaml", overrides, devices)
    from jaxdist.verbs.evaluate import generate_from_run

    text = generate_from_run(
        run,
        extra,
        prompt=prompt,
        tokens=tokens,
        temperature=temperature,
        seed=seed,
        step=step,
        console=shared.console(),
    )
    typer.echo(text)
