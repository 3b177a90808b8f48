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
    on: Annotated[list[str], typer.Option()],
    slices: shared.AtLeastOne = 1,
    top: Annotated[int, typer.Option(min=1, max=50)] = 5,
    write: Path | None = None,
    explain: shared.AtLeastOneOrNone = None,
    plot: Path | None = None,
    compile_top: Annotated[bool, typer.Option("--compile")] = False,
    memory: bool = False,
    json_file: shared.JsonFile = None,
) -> None:
    """Search for the mesh, ZeRO, remat, microbatches and schedule that train CONFIG fastest.

    The search uses formulas for memory and time, so that it needs no device and runs nothing. Plans
    replace CONFIG's mesh, sharding, parallel, model.remat and train.microbatches. All other
    settings are kept.

    Args:
      on: Target: a TPU slice (v5p:8x8x8), several slices (4xv5e:16x16), or GPUs as hosts x GPUs per
        host (h100:16x8). Repeat the option to compare targets.
      slices: Number of slices, connected by a slower network, for each --on without a number of
        slices.
      top: Number of plans to print for each target.
      write: Write CONFIG with the fastest plan to this file.
      explain: Print how the plan with this number spends time and memory.
      plot: Draw figures of the time and memory that --explain prints into this directory.
      compile_top: Compile each printed plan, which takes minutes; only for TPUs.
      memory: Ask the compiler for the memory of each printed plan, which takes seconds; only for
        TPUs.
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
