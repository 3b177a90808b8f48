"""The time that jaxdist takes to start, compared with the time to import jax."""

from __future__ import annotations

import os
import subprocess
import sys

from benchmarks.core.harness import REPEATS, alternate_processes
from benchmarks.core.report import Figure, Report
from jaxdist.runtime.environment import python_module

IMPORT_JAX = (sys.executable, "-c", "import jax")
IMPORT_JAXDIST = (sys.executable, "-c", "import jaxdist")
HELP = tuple(python_module("jaxdist.cli", "--help"))
START_BACKEND = (sys.executable, "-c", "import jax; jax.devices()")


def bench(repeats: int = REPEATS) -> Report:
    """Compare whole processes of `import jaxdist` and `jaxdist --help` with `import jax`."""
    figures = []
    for name, command in (("import jaxdist", IMPORT_JAXDIST), ("jaxdist --help", HELP)):
        ours, reference = alternate_processes(command, IMPORT_JAX, repeats=repeats)
        note = f"CPU {ours.cpu.median:.2f} s, over {reference.cpu.median:.2f} s of `import jax`"
        figures.append(Figure.compare(name, ours.wall, reference.wall, "<= 1.5", note))
    figures.append(
        Figure(
            "--help starts a backend",
            ours=float(starts_backend(HELP)),
            reference=float(starts_backend(START_BACKEND)),
            goal="<= 0",
            unit="",
            note="0 is no, 1 is yes; the reference is a process that starts one",
        )
    )
    return Report("startup", figures)


def starts_backend(command: tuple[str, ...]) -> bool:
    """Return whether a command starts jax's backend, which fails on an unknown platform."""
    environ = {**os.environ, "JAX_PLATFORMS": "no_such_platform"}
    return subprocess.run(command, env=environ, capture_output=True, timeout=120).returncode != 0
