"""The command that searches for a plan."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from jaxdist.cli import shared


def plan(
    config: shared.ConfigFile,
    overrides: shared.Overrides = None,
    *,
    on: Annotated[
        list[str],
        typer.Option(
            help="Target: a TPU slice (v5p:8x8x8), several slices (4xv5e:16x16), or GPUs as hosts "
            "x GPUs per host (h100:16x8). Repeat the option to compare targets."
        ),
    ],
    slices: Annotated[
        int,
        typer.Option(
            min=1,
            help="Number of slices, connected by a slower network, for each --on without a number "
            "of slices.",
        ),
    ] = 1,
    top: Annotated[
        int, typer.Option(min=1, max=50, help="Number of plans to print for each target.")
    ] = 5,
    write: Annotated[
        Path | None, typer.Option(help="Write CONFIG with the fastest plan to this file.")
    ] = None,
    explain: Annotated[
        int | None,
        typer.Option(min=1, help="Print how the plan with this number spends time and memory."),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            help="Draw figures of the time and memory that --explain prints into this directory."
        ),
    ] = None,
    compile_top: Annotated[
        bool,
        typer.Option(
            "--compile", help="Compile each printed plan, which takes minutes; only for TPUs."
        ),
    ] = False,
    memory: Annotated[
        bool,
        typer.Option(
            "--memory",
            help="Ask the compiler for the memory of each printed plan, which takes seconds; only "
            "for TPUs.",
        ),
    ] = False,
    json_file: shared.JsonFile = None,
) -> None:
    """Search for the mesh, ZeRO, remat, microbatches and schedule that train CONFIG fastest.

    The search uses formulas for memory and time, so that it needs no device and runs nothing. Plans
    replace CONFIG's mesh, sharding, parallel, model.remat and train.microbatches. All other
    settings are kept.
    """
    from jaxdist.runtime import environment

    if compile_top:
        environment.prepare(fake_devices=1)
    else:
        environment.prepare()
    from jaxdist.planner.report import Asked
    from jaxdist.planner.report import plan as search

    asked = Asked(on, slices, top, explain, compile_top, write, plot, json_file, memory)
    search(config, list(overrides or []), asked, console=shared.console())
