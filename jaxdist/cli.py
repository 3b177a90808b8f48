"""The command line: parse, call, print.

Nothing here imports jax before the environment is prepared, so that `--help` starts no backend and
fake devices can still be asked for.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

app = typer.Typer(
    name="jaxdist",
    help="Train any JAX model on any mesh by changing a config.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
config_app = typer.Typer(no_args_is_help=True, help="Look at configurations.")
data_app = typer.Typer(no_args_is_help=True, help="Prepare data.")
study_app = typer.Typer(no_args_is_help=True, help="Compare many runs of one config.")
app.add_typer(config_app, name="config")
app.add_typer(data_app, name="data")
app.add_typer(study_app, name="study")

_COMPUTING = ("train", "eval", "generate", "bench", "study")

ConfigFile = Annotated[Path, typer.Argument(help="YAML file of the experiment.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="Settings on top of it: section.key=value ...")
]
Devices = Annotated[int | None, typer.Option(min=1, help="Train on this many fake CPU devices.")]
Coordinator = Annotated[str | None, typer.Option(help="HOST:PORT of process 0.")]
NumProcesses = Annotated[int | None, typer.Option(help="Number of processes.")]
ProcessId = Annotated[int | None, typer.Option(help="Number of this process, from 0.")]
Detect = Annotated[
    bool, typer.Option("--distributed", help="Find the peers by Slurm, MPI, Kubernetes or TPU.")
]
Run = Annotated[Path, typer.Argument(help="Run directory.")]
Step = Annotated[int | None, typer.Option(help="Checkpoint to use; the newest by default.")]
CompileDevices = Annotated[
    int | None, typer.Option(min=1, help="Compile for this many fake CPU devices.")
]
Topology = Annotated[
    str | None, typer.Option(help="Compile for TPUs, none needed: v5e:2x4, v5p:4x4x4, ...")
]


def _console() -> Console:
    from rich.console import Console

    return Console(highlight=False)


def _prepare(path: Path, overrides: list[str] | None, devices: int | None) -> list[str]:
    """Set the environment for the config's fake devices, before jax is imported."""
    from jaxdist import environment

    extra = list(overrides or [])
    if devices is not None:
        extra.append(f"mesh.fake_devices={devices}")
    environment.prepare(fake_devices=_fake_devices(path, extra) or None)
    return extra


def _compile_for(devices: int | None, topology: str | None, overrides: list[str]) -> list[str]:
    """The overrides, and with them what to compile for, which is one thing."""
    from jaxdist.errors import MeshError

    if devices is not None and topology is not None:
        raise MeshError(
            f"--devices {devices} compiles for CPU, --topology {topology} for TPU: give one of them"
        )
    return [*overrides, *([] if devices is None else [f"mesh.fake_devices={devices}"])]


def _fake_devices(path: Path, overrides: list[str]) -> int:
    """The number of fake devices that a config asks for, or 0."""
    from jaxdist.config import read

    mesh = read(path, overrides).values.get("mesh")
    count = mesh.get("fake_devices") if isinstance(mesh, dict) else None
    return max(count, 0) if isinstance(count, int) else 0


@app.command()
def train(
    config: ConfigFile,
    overrides: Overrides = None,
    *,
    devices: Devices = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue from the newest whole checkpoint.")
    ] = False,
    coordinator: Coordinator = None,
    num_processes: NumProcesses = None,
    process_id: ProcessId = None,
    distributed: Detect = False,
) -> None:
    """Train as CONFIG says."""
    extra = _prepare(config, overrides, devices)
    from jaxdist.distributed import connected, find_processes
    from jaxdist.launch.train import run

    processes = find_processes(
        os.environ,
        coordinator=coordinator,
        count=num_processes,
        index=process_id,
        detect=distributed,
    )
    with connected(processes, _report):
        run(config, extra, resume=resume, console=_console())


@app.command(name="eval")
def evaluate(
    run: Run, overrides: Overrides = None, *, step: Step = None, devices: Devices = None
) -> None:
    """Evaluate a run's checkpoint on the whole held-out split."""
    extra = _prepare(run / "config.yaml", overrides, devices)
    from jaxdist.launch.evaluate import evaluate_run

    evaluate_run(run, extra, step=step, console=_console())


@app.command()
def generate(
    run: Run,
    overrides: Overrides = None,
    *,
    prompt: Annotated[str, typer.Option(help="Text to continue.")],
    tokens: Annotated[int, typer.Option(min=1, help="Number of tokens to add.")] = 256,
    temperature: Annotated[float, typer.Option(min=0, help="0 takes the likeliest.")] = 0.8,
    seed: Annotated[int, typer.Option(min=0, help="Of the random choices.")] = 0,
    step: Step = None,
    devices: Devices = None,
) -> None:
    """Continue a prompt with a run's language model."""
    extra = _prepare(run / "config.yaml", overrides, devices)
    from jaxdist.launch.evaluate import generate_from_run

    text = generate_from_run(
        run,
        extra,
        prompt=prompt,
        tokens=tokens,
        temperature=temperature,
        seed=seed,
        step=step,
        console=_console(),
    )
    typer.echo(text)


@app.command()
def parity(
    config: Annotated[
        Path | None, typer.Argument(help="YAML file; a small language model without one.")
    ] = None,
    overrides: Overrides = None,
    *,
    full: Annotated[
        bool, typer.Option("--full", help="All combinations, not just every two settings.")
    ] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write it as JSON too.")] = None,
) -> None:
    """Compare every exact way to train CONFIG's model with one device; exit code 1 if one differs.

    On 8 fake CPU devices, in float32, with AdamW: meshes, ZeRO stages, reductions, microbatches
    and remat, whatever CONFIG says of them.
    """
    from jaxdist import environment

    environment.prepare(fake_devices=8)
    from jaxdist.launch.parity import parity as compare

    results = compare(config, overrides or [], full=full, json_file=json_file, console=_console())
    raise typer.Exit(int(any(result.verdict == "differs" for result in results)))


@config_app.command()
def show(config: ConfigFile, overrides: Overrides = None) -> None:
    """Print the resolved tree, each value with where it came from, and what derives from it."""
    _prepare(config, overrides, None)
    from jaxdist.config import provenance, render
    from jaxdist.experiment import explain_config, load

    console = _console()
    document, instance = load(config, overrides or [])
    typer.echo(render(provenance(document, instance), console.width))
    for line in explain_config(instance, document):
        typer.echo(f"derived: {line}")


@config_app.command()
def schema() -> None:
    """Print the JSON schema of a configuration, for editors."""
    from jaxdist import environment

    environment.prepare()
    from jaxdist.config import json_schema
    from jaxdist.experiment import ExperimentConfig

    typer.echo(json_schema(ExperimentConfig))


@data_app.command()
def tokenize(
    out: Annotated[Path, typer.Argument(help="The tokenizer.json to write.")],
    files: Annotated[
        list[str] | None, typer.Argument(help="Globs of text; none is Python's own library.")
    ] = None,
    *,
    vocab_size: Annotated[int, typer.Option(help="Tokens to learn.")] = 4096,
    heldout_fraction: Annotated[
        float, typer.Option(min=0, max=0.99, help="As in the config's data.heldout_fraction.")
    ] = 0.05,
) -> None:
    """Train a BPE tokenizer, for `data.tokenizer: {type: bpe, file: OUT}`."""
    from jaxdist.launch.tokenize import tokenize as learn

    learn(
        out,
        files or [],
        vocab_size=vocab_size,
        heldout_fraction=heldout_fraction,
        console=_console(),
    )


@app.command()
def doctor(
    devices: Devices = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print and judge what a run stands on."""
    from jaxdist.doctor import main as examine

    raise typer.Exit(examine(devices=devices, as_json=as_json))


@app.command()
def inspect(
    config: ConfigFile,
    overrides: Overrides = None,
    *,
    devices: CompileDevices = None,
    topology: Topology = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="One setting, like an override.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write it as JSON too.")] = None,
    diff: Annotated[
        Path | None, typer.Option(help="A second config, with the same overrides: what differs?")
    ] = None,
    diff_set: Annotated[
        list[str] | None, typer.Option(help="One setting of the second: what does it change?")
    ] = None,
) -> None:
    """Print what a train step will cost: collectives, FLOPs, memory. Nothing is run."""
    from jaxdist import environment

    extra = _compile_for(devices, topology, [*(overrides or []), *(settings or [])])
    changes = diff_set or []
    counts = (_fake_devices(config, extra), _fake_devices(diff or config, [*extra, *changes]))
    environment.prepare(fake_devices=1 if topology else max(counts) or None)
    from jaxdist.launch.inspect import inspect as look

    look(
        config,
        extra,
        topology=topology,
        other=diff,
        changes=changes,
        json_file=json_file,
        console=_console(),
    )


@app.command()
def audit(
    config: ConfigFile,
    overrides: Overrides = None,
    *,
    devices: CompileDevices = None,
    topology: Topology = None,
    full: Annotated[
        bool, typer.Option("--full", help="Compile without each knob: bytes, memory, FLOPs.")
    ] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write it as JSON too.")] = None,
) -> None:
    """Check that each knob of CONFIG changes the train step; exit code 1 if one does not."""
    from jaxdist import environment

    extra = _compile_for(devices, topology, overrides or [])
    environment.prepare(fake_devices=1 if topology else _fake_devices(config, extra) or None)
    from jaxdist.launch.audit import audit as judge
    from jaxdist.launch.audit import has_no_effect

    findings = judge(
        config, extra, topology=topology, full=full, json_file=json_file, console=_console()
    )
    raise typer.Exit(int(has_no_effect(findings)))


@app.command()
def bench(
    name: Annotated[
        str,
        typer.Argument(help="overhead, compile, startup, quickstart, collectives, optim or zero."),
    ],
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the figures as JSON.")
    ] = None,
    devices: Devices = 8,
    lab: Annotated[
        bool, typer.Option("--lab", help="collectives: between hosts on slow links (Linux, root).")
    ] = False,
    plot: Annotated[
        Path | None, typer.Option(help="collectives, zero: draw into this directory.")
    ] = None,
) -> None:
    """Measure ours against a reference, interleaved; a missed goal is reported, not failed."""
    from jaxdist import environment

    environment.prepare(fake_devices=devices)
    from jaxdist.bench import run

    options = {"lab": lab or None, "plot": plot}
    given = {option: value for option, value in options.items() if value is not None}
    run(name, json_file, **given).print()


@study_app.command(name="batch-scaling")
def study_batch_scaling(
    config: ConfigFile,
    overrides: Overrides = None,
    *,
    batches: Annotated[str, typer.Option(help="Batch sizes: 64,256,1024.")],
    seeds: Annotated[int, typer.Option(min=1, help="Runs for each number in the table.")] = 3,
    optimizers: Annotated[
        str, typer.Option(help="Which to compare.")
    ] = "sgd,nesterov,lars,lamb,adamw",
    epochs: Annotated[
        float | None, typer.Option(help="Length of every run; the config's by default.")
    ] = None,
    tune: Annotated[
        bool, typer.Option("--tune/--no-tune", help="Search learning rates at every batch size.")
    ] = True,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write every run and the table as JSON.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw it into this directory.")] = None,
    devices: Devices = None,
) -> None:
    """Compare optimizers at growing batch sizes: one rule for all, and tuned at each size.

    Trains on all devices there are (one axis, data), whatever mesh CONFIG names. A study that was
    interrupted goes on where it was.
    """
    # First, so that the fake devices of the config's own mesh are not asked for.
    extra = _prepare(config, ["mesh={data: -1}", *(overrides or [])], devices)
    from jaxdist.study.batch_scaling import batch_scaling

    batch_scaling(
        config,
        extra,
        batches=batches,
        optimizers=optimizers,
        seeds=seeds,
        epochs=epochs,
        tune=tune,
        json_file=json_file,
        plot=plot,
        console=_console(),
    )


def _report(error: BaseException) -> int:
    """Say what went wrong, in one message where a user can mend it; returns the exit code."""
    from jaxdist.errors import JaxdistError

    if isinstance(error, JaxdistError):
        typer.echo(f"error: {error}", err=True)
        return error.exit_code
    if isinstance(error, KeyboardInterrupt):
        typer.echo("interrupted", err=True)
        return 130
    traceback.print_exception(error)
    return 1


def _guarded(call: Callable[[], Any]) -> int:
    try:
        call()
    except (Exception, KeyboardInterrupt) as error:
        return _report(error)
    return 0


def main() -> None:
    """Entry point of the `jaxdist` command."""
    if sys.argv[1:2] and sys.argv[1] in _COMPUTING:
        from jaxdist.environment import restart_with_huge_pages

        restart_with_huge_pages()
    sys.exit(_guarded(app))


if __name__ == "__main__":
    main()
