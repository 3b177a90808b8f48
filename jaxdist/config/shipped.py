"""The configurations that are installed with jaxdist."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parents[1] / "configs"


def shipped() -> dict[str, Path]:
    """Return the files of the shipped configurations, by name.

    >>> shipped()["gpt/quickstart"].name
    'quickstart.yaml'
    """
    files = sorted(FOLDER.glob("*/*.yaml"))
    return {path.relative_to(FOLDER).with_suffix("").as_posix(): path for path in files}


def shipped_name(path: Path) -> str:
    """Return the name that a file would have as a shipped configuration.

    >>> shipped_name(Path("configs/gpt/quickstart.yaml"))
    'gpt/quickstart'
    """
    return Path(*path.parts[-2:]).with_suffix("").as_posix()
