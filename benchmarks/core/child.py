"""Functions that run in a process of their own, with devices and settings of its own.

`python -m benchmarks.core.child MODULE:FUNCTION [JSON...]` calls a function with the arguments,
and prints the dataclasses that it gives as JSON.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from typing import Any, TypeVar

from pydantic import TypeAdapter

from jaxdist.errors import RunError
from jaxdist.runtime.environment import plan_environment, python_module
from jaxdist.types import Json

T = TypeVar("T")

QUICK_FLAG = "--xla_backend_optimization_level=0"
"""LLVM's effort, which decides neither memory nor collectives nor FLOPs: half the time on CPU."""


def call(
    function: Callable[..., Iterable[T]],
    record_type: type[T],
    *args: Json,
    what: str,
    environ: Mapping[str, str],
    timeout_seconds: float | None = None,
) -> list[T]:
    """What `function(*args)` gives in a new process.

    Args:
      function: at the top of a module; gives dataclasses of `record_type`.
      what: it does, for the message.

    Raises:
      RunError: it fails or takes too long.
    """
    run = command(function, *args)
    by_hand = f"run `{' '.join(run)}` by hand"
    try:
        done = subprocess.run(
            run, env=environ, capture_output=True, text=True, timeout=timeout_seconds
        )
    except subprocess.TimeoutExpired:
        raise RunError(f"{what} is not done after {timeout_seconds:g} s: {by_hand}") from None
    if done.returncode:
        last = done.stderr.strip().rpartition("\n")[2]
        raise RunError(f"{what} ended with exit code {done.returncode}: {last}; {by_hand}")
    read = TypeAdapter(record_type).validate_python
    return [read(record) for record in json.loads(done.stdout.splitlines()[-1])]


def command(function: Callable[..., Any], *args: Json) -> list[str]:
    """The program that `call` runs."""
    name = f"{function.__module__}:{function.__name__}"
    return python_module("benchmarks.core.child", name, *map(json.dumps, args))


def with_devices(fake_devices: int) -> dict[str, str]:
    """The environment of a program that runs on so many CPU devices."""
    return {**os.environ, **plan_environment(dict(os.environ), fake_devices=fake_devices)}


def compiling_on(fake_devices: int | None) -> dict[str, str]:
    """The environment of a program that compiles and runs nothing.

    Args:
      fake_devices: how many CPU devices it has; None for one that only compiles for others.
    """
    environ = with_devices(fake_devices or 1)
    if fake_devices is not None:
        environ["XLA_FLAGS"] += f" {QUICK_FLAG}"
    return environ


def main(name: str, *args: str) -> None:
    """Print what a function gives."""
    module, _, function = name.partition(":")
    found = getattr(importlib.import_module(module), function)(*map(json.loads, args))
    print(json.dumps([asdict(record) for record in found]))


if __name__ == "__main__":
    main(*sys.argv[1:])
