"""Records that another process prints as JSON, with devices and settings of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from jaxdist.errors import RunError
from jaxdist.runtime.environment import plan_environment
from jaxdist.types import JsonObject

QUICK_FLAG = "--xla_backend_optimization_level=0"
"""LLVM's effort, which decides neither memory nor collectives nor FLOPs: half the time on CPU."""


def records(
    command: Sequence[str],
    *,
    what: str,
    environ: Mapping[str, str],
    timeout_seconds: float | None = None,
) -> list[JsonObject]:
    """What a program gives to `show`.

    Args:
      what: it does, for the message.

    Raises:
      RunError: it fails or takes too long.
    """
    by_hand = f"run `{' '.join(command)}` by hand"
    try:
        done = subprocess.run(
            command, env=environ, capture_output=True, text=True, timeout=timeout_seconds
        )
    except subprocess.TimeoutExpired:
        raise RunError(f"{what} is not done after {timeout_seconds:g} s: {by_hand}") from None
    if done.returncode:
        last = done.stderr.strip().rpartition("\n")[2]
        raise RunError(f"{what} ended with exit code {done.returncode}: {last}; {by_hand}")
    return json.loads(done.stdout.splitlines()[-1])


def module(name: str, *args: str) -> list[str]:
    """The command that runs a module."""
    return [sys.executable, "-m", name, *args]


def compiling_on(fake_devices: int | None) -> dict[str, str]:
    """The environment of a program that compiles and runs nothing.

    Args:
      fake_devices: how many CPU devices it has; None for one that only compiles for others.
    """
    environ = dict(os.environ)
    environ |= plan_environment(environ, fake_devices=fake_devices or 1)
    if fake_devices is not None:
        environ["XLA_FLAGS"] += f" {QUICK_FLAG}"
    return environ


def show(found: Iterable[Any]) -> None:
    """Print dataclasses for `records`."""
    print(json.dumps([asdict(record) for record in found]))
