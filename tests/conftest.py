"""The settings of a test session: 8 fake devices, and rank promotion that raises."""

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

# Tests compile much and compute little. QUICK and OLD_LOOPS halve the time of a session. With
# IN_ONE_PIECE, a program is compiled as one piece on one core, which is a tenth less work; other
# cores run other tests. Processes that tests start do not have these flags, except QUICK and
# OLD_LOOPS in most processes of `helpers/runs.py`.
QUICK = "--xla_backend_optimization_level=0"
IN_ONE_PIECE = "--xla_cpu_parallel_codegen_split_count=1"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {QUICK}".strip()
environment.prepare(fake_devices=8)
# Except in `tests/proofs`, programs do not contain the lines of code of their operations. This
# saves a tenth of the time.
os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"
# glibc reads this variable when a process starts, so it has an effect in the workers of `-n`. It
# saves a twentieth of the time.
if tunables := environment.plan_tunables(os.environ, platform.libc_ver()[0]):
    os.environ["GLIBC_TUNABLES"] = tunables

import hypothesis  # noqa: E402  (the environment comes first)
import jax  # noqa: E402  (the same)
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

# A machine that is busy must not make a drawn example fail: no test asserts a time.
hypothesis.settings.register_profile("jaxdist", deadline=None)
hypothesis.settings.load_profile("jaxdist")

# Two folders have a conftest, and as doctest modules both would have the same name.
collect_ignore_glob = ["*/conftest.py"]

jax.config.update("jax_numpy_rank_promotion", "raise")

share_contexts()
share_programs()

# Objects that jax creates while it traces live long. With Python's default thresholds, garbage
# collection would take a tenth of the time.
gc.freeze()
gc.set_threshold(100_000, 20, 20)


def read_flags_with(*added: str) -> None:
    """Let XLA read XLA_FLAGS with added flags, and then restore the variable.

    XLA reads its flags once in a process. libtpu reads the variable later, and would end the
    process if the variable had flags of CPUs.
    """
    flags = os.environ["XLA_FLAGS"]
    os.environ["XLA_FLAGS"] = " ".join([flags, *added])
    jax.jit(jax.numpy.negative)(0)
    os.environ["XLA_FLAGS"] = flags


# The XLA of later versions of jax has no such flag.
read_flags_with(IN_ONE_PIECE, *([OLD_LOOPS] if jax.__version_info__ < (0, 11) else []))
CACHE = jax.config.jax_compilation_cache_dir

# Without this cache, each call of the command line would build all commands again, which takes a
# tenth of a second.
typer.main.get_command = cache(typer.main.get_command)


@pytest.fixture(scope="session", autouse=True)
def programs_of_runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Let the runs of this process share a compilation cache; each has its own data cache."""
    folder, enable = tmp_path_factory.mktemp("programs"), compilation_cache.enable
    with patch.object(compilation_cache, "enable", lambda directory: enable(folder)):
        yield


@pytest.fixture(autouse=True)
def own_compilation_cache() -> Iterator[None]:
    """Restore the compilation cache after each test.

    A run in this process sets another cache, from which later tests must not read programs.
    """
    yield
    if jax.config.jax_compilation_cache_dir != CACHE:
        jax.config.update("jax_compilation_cache_dir", CACHE)
        reset_cache()


def pytest_configure(config: pytest.Config) -> None:
    if counts_here(config):
        config.pluginmanager.register(Spent())


FIRST = ("tests/run", "tests/equivalence", "tests/bench", "tests/checkpoint")
"""Folders with few but long tests, which start first so that no worker waits at the end."""


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
    """Return the devices of a TPU topology, for which programs are compiled without the TPU."""
    need_libtpu()
    return topology_devices("v5e:2x4")


@pytest.fixture
def mount_tmpfs() -> Iterator[Callable[[Path, int], Path]]:
    """Return a function that mounts a disk of a given size at a directory until the test ends."""
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
