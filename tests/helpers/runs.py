"""Runs of the command line, in new processes or in this process, and readers of their files."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import chdir, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding
from warm import Process, Warm

from jaxdist.checkpoint.arrays import load_arrays
from jaxdist.checkpoint.layout import step_directory, steps_present
from jaxdist.checkpoint.manifest import read_manifest
from jaxdist.cli import app, shared
from jaxdist.metrics.goodput import SPLIT

DIGITS = {
    "model": {"type": "mlp", "hidden": [16]},
    "data": {"type": "images", "source": "digits"},
    "optim": {"type": "adamw", "learning_rate": 1e-3, "schedule": {"type": "constant"}},
    "train": {"steps": 24, "batch_size": 64, "log_every": 1},
    "eval": {"every": 8, "batches": 2},
    "checkpoint": {"every": 8, "keep": 2},
}
RUN = Path("runs/config")
TIMEOUT_SECONDS = 120
TAKE_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""
CLOCKS = ("time", "step_seconds")
LEAST = "--xla_backend_optimization_level=0"
"""A flag of XLA with which a process compiles in two thirds of the time, except with `fresh`."""
OLD_LOOPS = "--xla_cpu_use_fusion_emitters=false"
"""A flag of XLA before jax 0.11, with which a program compiles in a third of the time."""
QUICK = LEAST if jax.__version_info__ >= (0, 11) else f"{LEAST} {OLD_LOOPS}"
LOAD_LIBTPU = ("adopt", "audit", "inspect", "plan", "prove")
"""The commands that may compile for TPUs; libtpu ends the process if it reads a flag of CPUs."""
NO_BYTECODE = "PYTHONDONTWRITEBYTECODE"
"""A variable that children must not have: with it, each process compiles the package's sources."""


class Finished(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def message(self) -> str:
        """Standard error as one line, which must not contain a traceback."""
        assert "Traceback" not in self.err, self.err
        return " ".join(self.err.split())


class Jaxdist:
    """The command line in a working directory; `kill` ends processes that a test left running."""

    def __init__(self, folder: Path, cache: Path) -> None:
        self.folder = folder
        self.run = folder / RUN
        self._started: list[Process] = []
        self._cache = cache
        # The child must not have the settings of this session, but may use its compiled programs.
        foreign = ("XLA_FLAGS", "NPROC", "JAX_PLATFORMS", "GLIBC_TUNABLES", NO_BYTECODE)
        self._environ = {k: v for k, v in os.environ.items() if k not in foreign} | {
            "JAX_COMPILATION_CACHE_DIR": str(cache),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "COLUMNS": "80",
        }

    def config(self, sections: Any = DIGITS, **changes: Any) -> None:
        """Write config.yaml with `sections` and `changes`.

        A section of `changes` updates the section of the same name, or replaces it if the change
        has a type.
        """
        merged = dict(sections)
        for key, value in changes.items():
            merged[key] = value if "type" in value else {**merged.get(key, {}), **value}
        (self.folder / "config.yaml").write_text(json.dumps(merged))

    def start(
        self,
        *args: object,
        xla_flags: str = "",
        stdout: int | None = None,
        terminal: int | None = None,
        fresh: bool = False,
    ) -> Process:
        """Start `jaxdist args...`, and return its process.

        By default the process is forked from a process that has imported everything, and compiles
        without most optimizations. With `fresh`, a new Python process starts and compiles with
        XLA's defaults. With `terminal`, the process has a new session with that terminal.
        """
        # A child ignores each signal that its parent ignores. The parent may ignore SIGHUP, because
        # of nohup or because libtpu is loaded.
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        environ = {**self._environ, "XLA_FLAGS": xla_flags}
        if not fresh:
            least = LEAST if args[0] in LOAD_LIBTPU else QUICK
            environ["XLA_FLAGS"] = f"{least} {xla_flags}".strip()
        if not fresh and terminal is None:
            begun = warm(self._cache, self._environ).begin(
                [*map(str, args)], self.folder, environ, stdout
            )
            self._started.append(begun)
            return begun
        command = ["-P", "-m", "jaxdist.cli", *map(str, args)]
        process = subprocess.Popen(
            [sys.executable, *([] if terminal is None else ["-c", TAKE_TERMINAL]), *command],
            cwd=self.folder,
            env=environ,
            stdin=terminal,
            stdout=terminal or stdout or subprocess.PIPE,
            stderr=subprocess.PIPE if terminal is None else terminal,
            text=True,
            start_new_session=terminal is not None,
        )
        self._started.append(process)
        return process

    def __call__(self, *args: object, **options: Any) -> Finished:
        """Run `jaxdist args...` to its end."""
        return finish(self.start(*args, **options))

    def here(self, *args: object) -> Finished:
        """Run `jaxdist args...` in this process, which has 8 fake devices."""
        out, err, code = io.StringIO(), io.StringIO(), 0
        settings = {"COLUMNS": "80", "JAXDIST_CACHE": str(self.folder / "cache")}
        with (
            chdir(self.folder), patch.dict(os.environ, settings),
            redirect_stdout(out), redirect_stderr(err),
        ):  # fmt: skip
            try:
                app([*map(str, args)])
            except SystemExit as end:
                code = int(end.code or 0)
            except Exception as error:
                code = shared.print_error(error)
        return Finished(code, out.getvalue(), err.getvalue())

    def train(self, *args: object, **options: Any) -> Finished:
        """Run `jaxdist train config.yaml args...` to its end."""
        return self("train", "config.yaml", *args, **options)

    def kill(self) -> None:
        for process in self._started:
            process.kill()
            process.communicate()


_WARM: dict[Path, Warm] = {}


def warm(cache: Path, environ: Mapping[str, str]) -> Warm:
    """Return the process that forks the processes with this compilation cache.

    Each cache has its own such process, because jax reads the variable of the cache at its import.
    """
    if cache not in _WARM:
        _WARM[cache] = Warm(environ, cache.with_name(f"{cache.name}-warm.log"))
    return _WARM[cache]


def close_warm(cache: Path) -> None:
    """End the process that forks the processes with this compilation cache."""
    if cache in _WARM:
        _WARM.pop(cache).close()


def finish(process: Process) -> Finished:
    out, err = process.communicate(timeout=TIMEOUT_SECONDS)
    return Finished(process.returncode, out or "", err)


def metrics(run: Path, *, without: tuple[str, ...] = CLOCKS) -> list[dict[str, Any]]:
    """Return the records of a run, except goodput; an incomplete last line is an error."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    records = [record for record in lines if record["split"] != SPLIT]
    return [{k: v for k, v in record.items() if k not in without} for record in records]


def wait_for_step(process: Process, run: Path, step: int) -> int:
    """Wait until `step` is recorded, and return the number of records; fail if the process ends."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    file = run / "metrics.jsonl"
    while time.monotonic() < deadline:
        lines = file.read_text().splitlines() if file.exists() else []
        if f'{{"step": {step}, ' in "".join(lines):
            return len(lines)
        if process.poll() is not None:
            raise AssertionError(f"ended before step {step}: {finish(process)}")
        time.sleep(0.002)
    raise AssertionError(f"step {step} did not come within {TIMEOUT_SECONDS} s")


def kill_at_step(process: Process, run: Path, step: int) -> None:
    """Kill a process by SIGKILL when `step` has been recorded."""
    wait_for_step(process, run, step)
    process.kill()
    assert finish(process).code == -signal.SIGKILL


def steps(run: Path) -> list[int]:
    """Return the steps of a run that have a checkpoint."""
    return steps_present(run / "checkpoints")


def checkpoint(run: Path, step: int) -> dict[str, np.ndarray]:
    """Return the arrays of a checkpoint, by name."""
    path = step_directory(run / "checkpoints", step).absolute()
    manifest = read_manifest(path)
    place = SingleDeviceSharding(jax.devices()[0])
    target = {
        name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)
        for name, leaf in manifest.leaves.items()
    }
    return jax.device_get(load_arrays(path, manifest, target))


def assert_same_run(run: Path, reference: Path) -> None:
    """Assert that two runs have the same metrics, the same checkpoints and newest state."""
    assert metrics(run) == metrics(reference)
    assert steps(run) == steps(reference)
    newest = steps(run)[-1]
    found, expected = checkpoint(run, newest), checkpoint(reference, newest)
    assert found.keys() == expected.keys()
    for name in expected:
        assert found[name].tobytes() == expected[name].tobytes(), name
