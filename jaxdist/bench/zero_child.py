"""Records that a Python module prints as JSON, in a process of its own with its own devices."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from jaxdist.environment import plan_environment
from jaxdist.errors import RunError

QUICK_FLAG = "--xla_backend_optimization_level=0"
"""LLVM's effort, which decides neither memory nor collectives nor FLOPs: half the time on CPU."""


def records(
    module: str, *args: str, fake_devices: int | None = None, timeout_seconds: float
) -> list[dict[str, Any]]:
    """What `python -m module args...` gives to `show`.

    Args:
      fake_devices: how many CPU devices it has; None for one that only compiles for others.

    Raises:
      RunError: it fails or takes too long.
    """
    command = [sys.executable, "-m", module, *args]
    environ = dict(os.environ)
    environ |= plan_environment(environ, fake_devices=fake_devices or 1)
    if fake_devices is not None:
        environ["XLA_FLAGS"] += f" {QUICK_FLAG}"
    by_hand = f"run `{' '.join(command)}` by hand"
    try:
        done = subprocess.run(
            command, env=environ, capture_output=True, text=True, timeout=timeout_seconds
        )
    except subprocess.TimeoutExpired:
        raise RunError(
            f"{module} {' '.join(args)} is not done after {timeout_seconds:g} s: {by_hand}"
        ) from None
    if done.returncode:
        last = done.stderr.strip().rpartition("\n")[2]
        raise RunError(
            f"{module} {' '.join(args)} ended with exit code {done.returncode} ({last}): {by_hand}"
        )
    return json.loads(done.stdout.splitlines()[-1])


def show(found: Iterable[Any]) -> None:
    """Print dataclasses for `records`."""
    print(json.dumps([asdict(record) for record in found]))
