"""A strict session: 8 fake devices, rank promotion raises, warnings are errors."""

from __future__ import annotations

import gc
import importlib.util
import os
import platform
import subprocess
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from unittest.mock import patch

from spent import Spent, counts_here
from thin import thin_rows

from jaxdist.runtime import compilation_cache, environment

# Tests compile much and compute little: the first and the last of these halve the time. In one
# piece a program compiles with a tenth less work; the other core has tests of its own to run.
# Processes that tests start do without; most of `helpers/runs.py` have the first and the last.
QUICK = "--xla_backend_optimization_level=0"
IN_ONE_PIECE = "--xla_cpu_parallel_codegen_split_count=1"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {QUICK}".strip()
environment.prepare(fake_devices=8)
# Programs lack the lines of code of their operations, but in `tests/proofs`: a tenth of the time.
os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"
# For the workers of `-n`: glibc reads it when a process starts. A twentieth of the time.
if tunables := environment.plan_tunables(os.environ, platform.libc_ver()[0]):
    os.environ["GLIBC_TUNABLES"] = tunables

import jax  # noqa: E402  (the environment comes first)
import pytest  # noqa: E402  (the same)
import typer.main  # noqa: E402  (the same)
from jax.experimental.compilation_cache.compilation_cache import (  # noqa: E402  (the same)
    reset_cache,
)
from lowering import share_contexts  # noqa: E402  (the same)
from run_fixtures import compiled, finished, jaxdist, trained  # noqa: E402, F401  (fixtures)
from runs import OLD_LOOPS  # noqa: E402  (the same)
from sharing import share_programs  # noqa: E402  (the same)

from jaxdist.mesh import Device  # noqa: E402  (the same)
from jaxdist.runtime.topology import topology_devices  # noqa: E402  (the same)

# Two folders have a conftest; as doctest modules they would have one name.
collect_ignore_glob = ["*/conftest.py"]

jax.config.update("jax_numpy_rank_promotion", "raise")

share_contexts()
share_programs()

# What jax traces lives long: collected as often as Python does by itself, a tenth of the time goes.
gc.freeze()
gc.set_threshold(100_000, 20, 20)


def read_flags_with(*added: str) -> None:
    """XLA reads its flags once for a process; libtpu reads them later, and ends at one of CPUs."""
    flags = os.environ["XLA_FLAGS"]
    os.environ["XLA_FLAGS"] = " ".join([flags, *added])
    jax.jit(jax.numpy.negative)(0)
    os.environ["XLA_FLAGS"] = flags


# Later versions of XLA have but one way to make a fusion's loops.
read_flags_with(IN_ONE_PIECE, *([OLD_LOOPS] if jax.__version_info__ < (0, 11) else []))
CACHE = jax.config.jax_compilation_cache_dir

# Each call of the command line would build all its commands anew, a tenth of a second.
typer.main.get_command = cache(typer.main.get_command)


@pytest.fixture(scope="session", autouse=True)
def programs_of_runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Runs in this process share what they compile, though each has a cache of its own for data."""
    folder, enable = tmp_path_factory.mktemp("programs"), compilation_cache.enable
    with patch.object(compilation_cache, "enable", lambda directory: enable(folder)):
        yield


@pytest.fixture(autouse=True)
def own_compilation_cache() -> Iterator[None]:
    """What a run in this process sets for jax ends with its test: programs for TPU are not read
    back from a cache."""
    yield
    if jax.config.jax_compilation_cache_dir != CACHE:
        jax.config.update("jax_compilation_cache_dir", CACHE)
        reset_cache()


def pytest_configure(config: pytest.Config) -> None:
    if counts_here(config):
        config.pluginmanager.register(Spent())


FIRST = ("tests/run", "tests/equivalence", "tests/bench", "tests/checkpoint")
"""Folders whose files take long though they have few tests: begun last, one worker would wait."""


@pytest.hookimpl(tryfirst=True)  # before pytest itself selects by marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    thin_rows(items)
    items.sort(key=lambda item: not item.nodeid.startswith(FIRST))


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("needs_libtpu"):
        need_libtpu()


def need_libtpu() -> None:
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu is not installed: pip install 'jaxdist[tpu]' compiles for TPU anywhere")


@pytest.fixture(scope="session")
def devices() -> list[Device]:
    return jax.devices()


@pytest.fixture(scope="session")
def tpu_devices() -> list[Device]:
    """Devices of a TPU that is compiled for without being there."""
    need_libtpu()
    return topology_devices("v5e:2x4")


@pytest.fixture
def mount_tmpfs() -> Iterator[Callable[[Path, int], Path]]:
    """Makes a directory into a disk of so many bytes until the test ends."""
    mounted = []

    def mount(path: Path, size_bytes: int) -> Path:
        path.mkdir(exist_ok=True)
        command = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(path)]
        try:
            done = os.getuid() == 0 and not subprocess.run(command, capture_output=True).returncode
        except FileNotFoundError:
            done = False
        if not done:
            pytest.skip("needs root and the right to mount a tmpfs")
        mounted.append(path)
        return path

    yield mount
    for path in mounted:
        subprocess.run(["umount", str(path)], check=True)
