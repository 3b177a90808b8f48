from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from runs import Jaxdist


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compiled programs that the processes of all tests share."""
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture
def jaxdist(tmp_path: Path, compiled: Path) -> Iterator[Jaxdist]:
    command = Jaxdist(tmp_path, compiled)
    yield command
    command.kill()
