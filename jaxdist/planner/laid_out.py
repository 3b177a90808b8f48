"""The memory of a step as XLA lays it out, seconds into the compilation.

XLA:TPU decides where each buffer lies before it generates code, which takes nine tenths of the time
of a compilation and changes no size. So this module starts itself in another process, as
`python -m jaxdist.planner.laid_out CONFIG OVERRIDE... TOPOLOGY RESULT`, reads what that dumps as
soon as it is there, and ends it.
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
NEXT = "*/*after_optimizations_after_buffer_assignment.txt"
"""What XLA writes after it: then the report is whole."""
_ALLOCATION = re.compile(r"^allocation \d+: size (\d+), (.*)$", re.MULTILINE)
LOOK_SECONDS = 0.05


def laid_out_bytes(path: Path, overrides: Sequence[str], topology: str, limit_bytes: int) -> int:
    """Bytes that a config's train step takes on each device.

    Args:
      topology: a TPU slice.
      limit_bytes: of a device: what takes more is waited for, since the compiler refuses it.

    Raises:
      RunError: the compiler refuses it.
      JaxdistError: anything else goes wrong, such as libtpu that is not installed.
    """
    with TemporaryDirectory() as name:
        folder, result = Path(name), Path(name) / "result.json"
        command = [str(path), *overrides, topology, str(result)]
        with (folder / "said").open("wb") as said:
            child = subprocess.Popen(
                environment.python_module("jaxdist.planner.laid_out", *command),
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
    """Of the largest program that XLA has laid out, by its reports in a folder's folders.

    None where there is none yet.
    """
    written = {path.name.partition(".after_optimizations")[0] for path in folder.glob(NEXT)}
    reports = [path for path in folder.glob(REPORT) if path.name.split(".after_opt")[0] in written]
    return max(
        (allocated_bytes(path.read_text(errors="replace")) for path in reports), default=None
    )


def allocated_bytes(text: str) -> int:
    """Of main memory, by XLA's list of what a program allocates.

    What belongs to the threads of computations inside of it lies in the buffers of those that call
    them, and other memories have a color.

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
    """Compile a config's train step whole, and write its bytes on each device to a file."""
    *overrides, topology, result = rest
    environment.prepare(fake_devices=1)  # jax reads it once, when it is imported
    from jaxdist.inspect.program import inspect_step, open_subject
    from jaxdist.runtime.topology import topology_devices

    try:
        subject = open_subject(Path(path), overrides, topology_devices(topology))
        held = inspect_step(subject).ledger.memory
    except JaxdistError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
    kept = held.argument_bytes + held.output_bytes - held.alias_bytes + held.temp_bytes
    Path(result).write_text(json.dumps(kept))


if __name__ == "__main__":
    main(*sys.argv[1:])
