"""The memory of a step according to XLA's buffer assignment, without the rest of the compilation.

XLA:TPU assigns buffers before it generates code. Code generation takes nine tenths of the
compilation's time and does not change sizes. This module therefore compiles in a child process,
`python -m jaxdist.planner.laid_out CONFIG OVERRIDE... TOPOLOGY RESULT`. As soon as the child has
written a complete report of the assignment, this process reads the report and kills the child.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from jaxdist.errors import JaxdistError, RunError
from jaxdist.runtime import environment

REPORT = "*/*after_optimizations-buffer-assignment.txt"
"""The pattern of the path of XLA's report on the assignment of buffers."""
NEXT = "*/*after_optimizations_after_buffer_assignment.txt"
"""The pattern of the path of the file that XLA writes after the report. If this file exists, the
report is complete."""
_ALLOCATION = re.compile(r"^allocation \d+: size (\d+), (.*)$", re.MULTILINE)
LOOK_SECONDS = 0.05
"""The time between two searches for the report."""


def laid_out_bytes(path: Path, overrides: Sequence[str], topology: str, limit_bytes: int) -> int:
    """Return the bytes that a config's train step takes on each device.

    Args:
      path: the configuration file, to which `overrides` are applied.
      topology: the TPU slice to compile for.
      limit_bytes: the memory of a device. The compilation of a program that needs more is not
        stopped early: at the end of the compilation, the compiler refuses this program with a
        message.

    Raises:
      RunError: the compiler refuses the program.
      JaxdistError: any other failure, such as a missing libtpu.
    """
    with TemporaryDirectory() as name:
        folder, result = Path(name), Path(name) / "result.json"
        command = [str(path), *overrides, topology, str(result)]
        with (folder / "said").open("wb") as said:
            child = subprocess.Popen(
                environment.python_module("jaxdist.planner.laid_out", *command),
                # In the child, `compile_with_text` makes a temporary directory for XLA's dump.
                # TMPDIR places that directory in the folder that this process watches.
                env={**os.environ, "TMPDIR": name},
                stdout=subprocess.DEVNULL,
                stderr=said,
            )
        try:
            while child.poll() is None:
                found = reported_bytes(folder)
                if found is not None and found <= limit_bytes:
                    return found
                time.sleep(LOOK_SECONDS)
        finally:
            child.kill()
            child.wait()
        if child.returncode:
            words = (folder / "said").read_text(errors="replace").strip()
            raised = RunError if child.returncode == RunError.exit_code else JaxdistError
            raise raised(words or f"exit code {child.returncode}")
        return json.loads(result.read_text())


def reported_bytes(folder: Path) -> int | None:
    """Return the bytes of the largest program in XLA's reports, or None without a complete report.

    Args:
      folder: the folder whose subfolders have the reports.
    """
    written = {path.name.partition(".after_optimizations")[0] for path in folder.glob(NEXT)}
    reports = [path for path in folder.glob(REPORT) if path.name.split(".after_opt")[0] in written]
    return max(
        (allocated_bytes(path.read_text(errors="replace")) for path in reports), default=None
    )


def allocated_bytes(text: str) -> int:
    """Return the number of bytes of main memory in XLA's list of a program's allocations.

    Thread-local allocations are not counted, since the buffers of the calling computation include
    them. Allocations with a color are not counted either, since they are in other memories.

    >>> allocated_bytes("allocation 0: size 4096, page 0, parameter 1, shape |f32[1024]| at")
    4096
    >>> allocated_bytes("allocation 1: size 512, page 0, thread-local:")
    0
    """
    found = _ALLOCATION.findall(text)
    return sum(
        int(size) for size, what in found if "thread-local" not in what and "color" not in what
    )


def main(path: str, *rest: str) -> None:
    """Compile a config's train step, and write to a file how many bytes of memory a device needs.

    Args:
      path: the configuration file.
      rest: the overrides, the topology, and the path of the result.
    """
    *overrides, topology, result = rest
    # jax reads the number of devices when the imports below import jax.
    environment.prepare(fake_devices=1)
    from jaxdist.inspect.program import inspect_step, open_subject

    try:
        subject = open_subject(Path(path), overrides, topology)
        held = inspect_step(subject).ledger.memory
    except JaxdistError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
    kept = held.argument_bytes + held.output_bytes - held.alias_bytes + held.temp_bytes
    Path(result).write_text(json.dumps(kept))


if __name__ == "__main__":
    main(*sys.argv[1:])
