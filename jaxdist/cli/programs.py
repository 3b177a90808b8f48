"""The commands that examine compiled programs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from jaxdist.cli import shared


def inspect(
    config: shared.ConfigFile,
    overrides: shared.Overrides = None,
    *,
    devices: shared.CompileDevices = None,
    topology: shared.TopologyOption = None,
    settings: Annotated[list[str] | None, typer.Option("--set")] = None,
    json_file: shared.JsonFile = None,
    diff: Path | None = None,
    diff_set: list[str] | None = None,
    plot: Path | None = None,
) -> None:
    """Print the bytes, FLOPs, memory, and time on TPUs of a train step. Nothing is run.

    Args:
      settings: A setting section.key=value, like an override; may be repeated.
      diff: Compare with a second config, with the same overrides, and print the differences.
      diff_set: Print the differences that this setting makes; may be repeated.
      plot: Draw a figure of the predicted step time into this directory; TPUs only.
    """
    extra = shared.compile_for(devices, topology, [*(overrides or []), *(settings or [])])
    changes = diff_set or []
    other = (diff or config, [*extra, *changes])
    shared.set_environment((config, extra), other, topology=topology)
    from jaxdist.inspect.report import inspect as look

    look(
        config,
        extra,
        topology=topology,
        other=diff,
        changes=changes,
        json_file=json_file,
        plot=plot,
        console=shared.console(),
    )


def audit(
    config: shared.ConfigFile,
    overrides: shared.Overrides = None,
    *,
    devices: shared.CompileDevices = None,
    topology: shared.TopologyOption = None,
    full: bool = False,
    options: bool = False,
    json_file: shared.JsonFile = None,
) -> None:
    """Check that each setting of CONFIG changes the train step. Exit with code 1 if not all do.

    Args:
      full: Print how each setting changes bytes, memory and FLOPs; compiles a step for each
        setting.
      options: Print the effect of each compiler option instead of the effect of each setting.
    """
    extra = shared.compile_for(devices, topology, overrides or [])
    shared.set_environment((config, extra), topology=topology)
    if options:
        from jaxdist.audit.options import audit_options

        shared.alone("--options", **{"--full": full})
        audit_options(
            config, extra, topology=topology, json_file=json_file, console=shared.console()
        )
        return
    from jaxdist.audit.report import audit as judge
    from jaxdist.audit.report import has_no_effect

    findings = judge(
        config, extra, topology=topology, full=full, json_file=json_file, console=shared.console()
    )
    raise typer.Exit(int(has_no_effect(findings)))


def parity(
    config: Annotated[Path | None, typer.Argument()] = None,
    overrides: shared.Overrides = None,
    *,
    full: bool = False,
    jobs: shared.AtLeastOne = 1,
    json_file: shared.JsonFile = None,
    resume: bool = False,
    draw: shared.AtLeastOneOrNone = None,
    seed: shared.AtLeastZero = 0,
    axis: list[str] | None = None,
) -> None:
    """Check that plans train CONFIG's model like a single device. Exit with code 1 if not all do.

    The plans vary meshes, ZeRO stages, reductions, microbatches, remat, a split sequence, pipeline
    schedules and activations, on 8 fake CPU devices, in float32, with AdamW. The values of these
    settings in CONFIG are ignored.

    With --draw, random models, meshes, plans, batches and optimizers are compared with a single
    device, and another plan loads each checkpoint. The config of each failure is printed. This
    option needs a checkout of jaxdist's repository.

    Args:
      config: YAML file of the experiment; by default a config of a small language model.
      full: Compare every plan without stages, and more pipelines; takes an hour.
      jobs: Number of processes that compare plans at the same time.
      resume: Skip the plans that the file of --json already contains.
      draw: Compare this number of randomly drawn configs instead of CONFIG.
      seed: Seed of the first random config; each later seed is 1 higher.
      axis: Compare only draws whose mesh has this axis; may be repeated.
    """
    from jaxdist.errors import ConfigError
    from jaxdist.runtime import environment

    if resume and json_file is None:
        raise ConfigError("--resume continues the file of --json: give --json FILE too")
    environment.prepare(fake_devices=8)
    if draw is not None:
        shared.alone("--draw", CONFIG=config, **{"--full": full})
        shared.find_benchmarks("jaxdist parity --draw", "test")
        from benchmarks.draws.compare import parity_draws

        outcomes = parity_draws(
            draw,
            seed=seed,
            axes=axis or (),
            jobs=jobs,
            json_file=json_file,
            resume=resume,
            console=shared.console(),
        )
        raise typer.Exit(int(not all(outcome.good for outcome in outcomes)))
    if axis:
        raise ConfigError("--axis selects among random configs: add --draw N")
    from jaxdist.parity.compare import parity as compare

    results = compare(
        config,
        overrides or [],
        full=full,
        jobs=jobs,
        json_file=json_file,
        resume=resume,
        console=shared.console(),
    )
    raise typer.Exit(int(any(result.verdict == "differs" for result in results)))


def prove(
    config: shared.ConfigFile,
    overrides: shared.Overrides = None,
    *,
    devices: shared.CompileDevices = None,
    near: shared.AtLeastZero = 2,
    seed: shared.AtLeastZero = 0,
    json_file: shared.JsonFile = None,
) -> None:
    """Prove for each parameter that CONFIG's plan computes what a single device would.

    The command checks the types of values, numbers of a smaller model, and the bytes of the
    compiled step. The command writes the certificate that `jaxdist train --proved` needs. The exit
    code is 1 if anything is wrong or undecided.

    Args:
      near: Number of additional plans to compare, each of which is CONFIG with three changed
        settings.
      seed: Seed of the weights and of the additional plans.
    """
    extra = shared.compile_for(devices, None, overrides or [])
    shared.set_environment((config, extra), devices=8)
    from jaxdist.proofs.report import prove as show

    given = {"near": near, "seed": seed, "json_file": json_file, "console": shared.console()}
    proof = show(config, extra, **given)
    raise typer.Exit(int(proof.verdict != "proved"))
