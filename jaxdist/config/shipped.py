"""The configurations that come with jaxdist, wherever it is installed."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parents[1] / "configs"


def shipped() -> dict[str, Path]:
    """Their files by name.

    >>> shipped()["gpt/quickstart"].name
    'quickstart.yaml'
    """
    files = sorted(FOLDER.glob("*/*.yaml"))
    return {path.relative_to(FOLDER).with_suffix("").as_posix(): path for path in files}


def name_of(path: Path) -> str:
    """What a file would be called if it were one of them.

    >>> name_of(Path("configs/gpt/quickstart.yaml"))
    'gpt/quickstart'
    """
    return Path(*path.parts[-2:]).with_suffix("").as_posix()
