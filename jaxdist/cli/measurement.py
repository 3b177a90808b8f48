"""The commands that measure and compare: benchmarks, studies and simulations."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from jaxdist.cli import shared

ConfigAndSettings = Annotated[list[str] | None, typer.Argument(metavar="[CONFIG] [key=value ...]")]


def bench(
    name: str,
    json_file: shared.JsonFile = None,
    devices: shared.Devices = 8,
    lab: bool = False,
    torch: str | None = None,
    ray: str | None = None,
    sigterms: shared.AtLeastOneOrNone = None,
    scoreboard: str | None = None,
    programs: Annotated[int | None, typer.Option(min=0)] = None,
    maxtext: Path | None = None,
    weights: Path | None = None,
    part: list[str] | None = None,
    plot: Path | None = None,
    record: Path | None = None,
) -> None:
    """Measure jaxdist and a reference in turn. Missed goals are reported, but are not errors.

    Args:
      name: overhead, compile, startup, quickstart, attention, context, collectives, optim, zero,
        pipeline, tpu, plan, compression, param-server, elastic, prove, models, gpu, experts,
        hybrid, jobs.
      lab: collectives, compression, param-server, plan: emulate hosts with slow links (Linux,
        root).
      torch: compression --lab, elastic, models, jobs: path of a Python with torch.
      ray: param-server: path of a Python with ray, jax and numpy.
      sigterms: elastic: number of runs that a signal stops.
      scoreboard: elastic: faults to inject: all, or a list such as R08=20,R29.
      programs: plan: number of plans whose memory the compiler computes; with 0 only formulas are
        used. prove: number of correct plans to check.
      maxtext: plan: folder of MaxText's programs from scripts/maxtext.
      weights: models: a directory or a GGUF file with pretrained weights.
      part: May be repeated. jobs: cnn, flops, augmentation, packing, steps, targets, or one config
        of the targets, such as targets:mlp/digits. models: families, weights, tuning, generation,
        loading, muon, adopt, or a case of a part, such as families:gpt2. hybrid: bytes, store,
        bounded, worker, kills, links, ratings, clicks. tpu: products, context, experts, steps.
      plot: collectives, zero: draw the figures into this directory.
      record: Append the measured ratios to DIR/NAME.jsonl.
    """
    from jaxdist.runtime import environment

    # Only the bench of a GPU needs the accelerator, so fake devices are for the other benches.
    environment.prepare(fake_devices=None if name == "gpu" else devices)
    shared.find_benchmarks("jaxdist bench", "bench")
    from benchmarks import run
    from benchmarks.core import ranges

    options = {
        "lab": lab or None,
        "torch": torch,
        "ray": ray,
        "plot": plot,
        "sigterms": sigterms,
        "scoreboard": scoreboard,
        "programs": programs,
        "maxtext": maxtext,
        "weights": weights,
        "part": part or None,
    }
    given = {option: value for option, value in options.items() if value is not None}
    report = run(name, json_file, **given)
    report.print()
    if record is not None:
        ranges.record(report, record)


def compare(
    config: shared.ConfigFile,
    overrides: shared.Overrides = None,
    *,
    of: str | None = None,
    variant: list[str] | None = None,
    seeds: shared.AtLeastOne = 3,
    json_file: shared.JsonFile = None,
    plot: Path | None = None,
    devices: shared.Devices = None,
) -> None:
    """Train variants of CONFIG on the same batches, and compare their held-out loss.

    The first variant is CONFIG itself, without compression if --of compression is given. For each
    seed, all variants begin with the same parameters and take the same number of steps. If the
    study is interrupted, the same command continues it.

    Args:
      of: Built-in set of variants to compare: compression.
      variant: A variant NAME='section.key=value section.key=value'; may be repeated.
      seeds: Number of runs (seeds) of each variant.
      plot: Draw figures of the differences between variants into this directory.
    """
    extra = shared.prepare_devices(config, overrides, devices)
    from jaxdist.study.compare import compare_variants as run
    from jaxdist.study.definition import VariantsStudy

    study = VariantsStudy(config=config, of=of, seeds=seeds)
    given = {"json_file": json_file, "plot": plot, "console": shared.console()}
    run(study, extra, variants=variant or [], **given)


def batch_scaling(
    config: shared.ConfigFile,
    overrides: shared.Overrides = None,
    *,
    batches: Annotated[str, typer.Option()],
    seeds: shared.AtLeastOne = 3,
    optimizers: str = "sgd,nesterov,lars,lamb,adamw",
    epochs: float | None = None,
    tune: bool = True,
    json_file: shared.JsonFile = None,
    plot: Path | None = None,
    devices: shared.Devices = None,
) -> None:
    """Compare optimizers at growing batch sizes, with scaled and with tuned learning rates.

    The command trains on all devices along axis data, and ignores the mesh of CONFIG. If the study
    is interrupted, the same command continues it.

    Args:
      batches: Batch sizes: 64,256,1024.
      seeds: Number of runs for each figure in the table.
      optimizers: Optimizers to compare.
      epochs: Number of epochs of every run; by default the number in the config.
      tune: Search the best learning rate at every batch size.
      plot: Draw the curves into this directory.
    """
    # The new mesh precedes the user's overrides. It drops the fake devices of the config's mesh,
    # but an override can still request fake devices.
    extra = shared.prepare_devices(config, ["mesh={data: -1}", *(overrides or [])], devices)
    from jaxdist.study.batch_scaling import batch_scaling as compare
    from jaxdist.study.definition import BatchScalingStudy
    from jaxdist.study.plan import parse_batches, parse_optimizers

    study = BatchScalingStudy(
        config=config,
        batches=parse_batches(batches),
        contenders=parse_optimizers(optimizers),
        seeds=seeds,
        epochs=epochs,
        tune=tune,
    )
    compare(study, extra, json_file=json_file, plot=plot, console=shared.console())


def run_study(
    file: Path,
    settings: Annotated[list[str] | None, typer.Argument()] = None,
    *,
    json_file: shared.JsonFile = None,
    plot: Path | None = None,
    devices: shared.Devices = None,
) -> None:
    """Run a study that a YAML file defines: a config, variants or batch sizes, and seeds.

    If the study is interrupted, the same command continues it.

    Args:
      file: YAML file of the study.
      settings: Settings that override the file: key=value ...
      plot: Draw the figures of the study into this directory.
    """
    from jaxdist.study.definition import BatchScalingStudy, read_study
    from jaxdist.study.variants import overrides_of

    study = read_study(file, settings or [])
    of_all = list(overrides_of(study.set))
    scaling = isinstance(study, BatchScalingStudy)
    extra = shared.prepare_devices(study.config, ["mesh={data: -1}"] * scaling + of_all, devices)
    given = {"json_file": json_file, "plot": plot, "console": shared.console()}
    if isinstance(study, BatchScalingStudy):
        from jaxdist.study.batch_scaling import batch_scaling as scale

        scale(study, extra, **given)
    else:
        from jaxdist.study.compare import compare_variants as run

        run(study, extra, **given)


def review(
    settings: Annotated[list[str] | None, typer.Argument(metavar="[FILE] [key=value ...]")] = None,
    *,
    json_file: shared.JsonFile = None,
    plot: Path | None = None,
    devices: shared.Devices = 8,
) -> None:
    """Compare architectures and optimizers on one page, as survey articles do.

    The efficiency for each number of devices is from the simulator and the cost model.
    Communication and memory are from compiled programs, and the comparison of optimizers is from a
    recorded study.

    Keys: devices, parameter_bytes, step_seconds, gbits, latency_seconds, servers, microbatches,
    layers, message_bytes, measured, program, patterns, scaling.

    Args:
      settings: YAML file, and settings key=value that override the file.
      plot: Draw the figures into this directory.
    """
    from jaxdist.runtime import environment

    if "jax" not in sys.modules:
        # Programs are read and never run. Without LLVM's optimizations, compiling them takes half
        # of the time.
        flags = os.environ.get("XLA_FLAGS", "")
        os.environ["XLA_FLAGS"] = f"--xla_backend_optimization_level=0 {flags}".strip()
    environment.prepare(fake_devices=devices)
    from jaxdist.simulation.review.page import run_review

    run_review(settings or [], json_file=json_file, plot=plot, console=shared.console())


def servers(
    config: shared.ConfigFile,
    overrides: shared.Overrides = None,
    *,
    variant: list[str] | None = None,
    seeds: shared.AtLeastOne = 1,
    target: float | None = None,
    json_file: shared.JsonFile = None,
    plot: Path | None = None,
    devices: shared.Devices = None,
) -> None:
    """Train CONFIG with parameter servers in virtual time.

    Gradients are computed, but speeds and faults are simulated. CONFIG's strategy.simulation
    describes the workers, the network and the faults. A repetition of the command gives the same
    bits.

    Args:
      variant: A variant NAME='section.key=value section.key=value' to compare; may be repeated.
      seeds: Number of runs (seeds) of each variant.
      target: Held-out loss to which the time is measured; by default 1% above the first variant's
        final loss.
      plot: Draw the curves into this directory.
    """
    extra = shared.prepare_devices(config, overrides, devices)
    from jaxdist.simulation.command import run_simulation

    run_simulation(
        config,
        extra,
        variants=variant or [],
        seeds=seeds,
        target=target,
        json_file=json_file,
        plot=plot,
        console=shared.console(),
    )


def fleet(
    settings: ConfigAndSettings = None,
    *,
    json_file: shared.JsonFile = None,
    plot: Path | None = None,
) -> None:
    """Simulate the goodput of a fleet of failing devices for several intervals between saves.

    The command compares checkpoints on disk with checkpoints and snapshots in memory. The default
    is the fleet of Llama 3: 16,384 devices with 466 failures in 54 days.

    Keys: devices, failures_per_1000_device_days, days, detect_seconds,
    restart_seconds, restore_seconds, memory_restore_seconds,
    checkpoint_seconds, snapshot_seconds, both_copies_lost,
    checkpoint_every_seconds, runs, seed.

    Args:
      settings: YAML file of the fleet, and settings key=value that override the file.
      plot: Draw goodput against the interval between saves into this directory.
    """
    from jaxdist.simulation.fleet import run_fleet

    run_fleet(settings or [], json_file=json_file, plot=plot, console=shared.console())


def choice(
    settings: ConfigAndSettings = None,
    *,
    json_file: shared.JsonFile = None,
) -> None:
    """Compare step times of parameter servers and an all-reduce, by link, straggler and sparsity.

    The times are from the simulator and the cost model of collectives, for a model of any size.

    Keys: parameter_bytes, touched, step_seconds, gbits, latency_seconds,
    workers, servers, slower, noise.

    Args:
      settings: YAML file, and settings key=value that override the file.
    """
    from jaxdist.simulation.choice import run_choice

    run_choice(settings or [], json_file=json_file, console=shared.console())
