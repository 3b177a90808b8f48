"""Fixtures of tests that use the command line; `tests/conftest.py` has them for all folders."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from runs import Jaxdist, close_warm


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return the folder of the compilation cache that the processes of all tests share."""
    cache = tmp_path_factory.mktemp("compiled")
    yield cache
    close_warm(cache)


@pytest.fixture
def jaxdist(tmp_path: Path, compiled: Path) -> Iterator[Jaxdist]:
    command = Jaxdist(tmp_path, compiled)
    yield command
    command.kill()


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory, compiled: Path) -> tuple[Path, str]:
    """Train in this process, and return the folder of the finished run and its output."""
    command = Jaxdist(tmp_path_factory.mktemp("finished"), compiled)
    command.config()
    done = command.here("train", "config.yaml")
    assert (done.code, done.err) == (0, ""), done
    return command.folder, done.out


@pytest.fixture
def trained(jaxdist: Jaxdist, finished: tuple[Path, str]) -> Jaxdist:
    """Return a command line whose working directory has a copy of the run of `finished`."""
    shutil.copytree(finished[0], jaxdist.folder, dirs_exist_ok=True)
    return jaxdist
