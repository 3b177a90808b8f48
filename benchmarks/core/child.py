"""Functions that run in a separate process, which can have other devices and settings.

`python -m benchmarks.core.child MODULE:FUNCTION [JSON...]` calls a function and prints the
dataclasses that it returns as JSON. The function's annotations say how to read its arguments and
results.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from typing import Any, ParamSpec, TypeVar, get_args, get_type_hints

from pydantic import TypeAdapter, validate_call
from pydantic_core import to_jsonable_python

from jaxdist.errors import RunError
from jaxdist.runtime.environment import plan_environment, python_module

P = ParamSpec("P")
T = TypeVar("T")

QUICK_FLAG = "--xla_backend_optimization_level=0"
"""A flag that halves compile time on CPU; memory, collectives and FLOPs stay the same."""
TIMEOUT_SECONDS = 1800.0
"""The longest time that one process may take."""


def apart(
    function: Callable[P, Iterable[T]],
    what: str,
    *,
    devices: int | Callable[P, int | None] | None = None,
    compiles: bool = True,
) -> Callable[P, list[T]]:
    """Return a function that calls `function` in a new process.

    Args:
      function: a function at the top of a module, annotated as an iterable of a dataclass.
      what: its purpose, for the error message; `{}` is replaced by its argument.
      devices: the number of CPU devices of the process, or a function from the arguments to it;
        None if the process compiles only for other devices.
      compiles: whether the process only compiles, so that LLVM may skip its optimizations.
    """

    def measure(*args: P.args, **options: P.kwargs) -> list[T]:
        assert not options, "arguments are given by position"
        count = devices(*args, **options) if callable(devices) else devices
        environ = compiling_on(count) if compiles else with_devices(count or 1)
        return call(function, *args, what=what.format(*args), environ=environ)

    return measure


def call(
    function: Callable[..., Iterable[T]], *args: object, what: str, environ: Mapping[str, str]
) -> list[T]:
    """Return the results of `function(*args)` in a new process; see `apart`.

    Raises:
      RunError: the process fails or takes too long.
    """
    run = command(function, *args)
    by_hand = f"run `{' '.join(run)}` by hand"
    try:
        done = subprocess.run(
            run, env=environ, capture_output=True, text=True, timeout=TIMEOUT_SECONDS
        )
    except subprocess.TimeoutExpired:
        raise RunError(f"{what} is not done after {TIMEOUT_SECONDS:g} s: {by_hand}") from None
    if done.returncode:
        last = done.stderr.strip().rpartition("\n")[2]
        raise RunError(f"{what} ended with exit code {done.returncode}: {last}; {by_hand}")
    # Libraries may print to standard output before: the answer is the last line.
    return read(function, done.stdout.splitlines()[-1])


def read(function: Callable[..., Iterable[T]], line: str) -> list[T]:
    """Read the results of `function` from the line that `answer` returned."""
    reader = TypeAdapter[T](get_args(get_type_hints(function)["return"])[0])
    return [reader.validate_python(record) for record in json.loads(line)]


def answer(name: str, *args: str) -> str:
    """Call the function `MODULE:FUNCTION` with JSON and return its results as a line of JSON."""
    module, _, function = name.partition(":")
    found = validate_call(getattr(importlib.import_module(module), function))
    return json.dumps([asdict(record) for record in found(*map(json.loads, args))])


def command(function: Callable[..., Any], *args: object, by: str = __name__) -> list[str]:
    """Return the command line that calls `function` with the module `by` as its program."""
    name = f"{function.__module__}:{function.__name__}"
    return python_module(by, name, *(json.dumps(to_jsonable_python(arg)) for arg in args))


def with_devices(fake_devices: int) -> dict[str, str]:
    """Return the environment of a program that runs on a number of fake CPU devices."""
    return {**os.environ, **plan_environment(dict(os.environ), fake_devices=fake_devices)}


def compiling_on(fake_devices: int | None) -> dict[str, str]:
    """Return the environment of a program that compiles but runs nothing.

    Args:
      fake_devices: the number of its CPU devices, or None if it compiles only for other devices.
    """
    environ = with_devices(fake_devices or 1)
    if fake_devices is not None:
        environ["XLA_FLAGS"] += f" {QUICK_FLAG}"
    return environ


def main(name: str, *args: str) -> None:
    """Print the results of a function as a line of JSON."""
    print(answer(name, *args))


if __name__ == "__main__":
    main(*sys.argv[1:])
