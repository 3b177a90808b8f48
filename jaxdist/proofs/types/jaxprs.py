"""Functions that find the programs inside a program, and the lines of code behind an equation.

A program is a jaxpr of jax, and an equation is an operation of the program.
"""

from __future__ import annotations

from pathlib import PurePath
from typing import Any

from jaxdist.jaxprs import equations

LIBRARY = "in a library"
"""The text that is reported instead of a line for code that only libraries have called."""
_LIBRARIES = (
    "site-packages dist-packages /jaxdist/proofs/ /jaxdist/collectives/ /jaxdist/hlo/source/"
)
LIBRARIES = _LIBRARIES.split()
"""Parts of paths. A file whose path has any of these parts is never reported as the cause of an
error."""

OPTIMIZERS = ("/optax/", "/flax/training/")
"""Parts of the paths of libraries whose lines are reported in addition to the user's line."""


_PIECEWISE = ("pallas_call", "reduce", "reduce_window")
"""The primitives whose program works on blocks or elements of their operands, not on arrays."""


def called_by(eqn: Any) -> Any:
    """Return the program that an equation calls exactly once, or None for any other equation."""
    for name in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        called = eqn.params.get(name)
        if called is not None and eqn.primitive.name not in _PIECEWISE:
            return getattr(called, "jaxpr", called)
    return None


def axes_over(eqn: Any) -> tuple[Any, ...]:
    """Return the mesh axes that a collective spans."""
    named = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    return tuple(named) if isinstance(named, tuple | list) else (named,)


def lines_of(eqn: Any) -> tuple[str, str]:
    """Return the line of the user's code and the line of an optimizer library behind an equation.

    Each line has the form `file:number`. `LIBRARY` replaces a line that does not exist.
    """
    traceback, found = eqn.source_info.traceback, {}
    for frame in traceback.frames if traceback is not None else ():
        library = any(part in frame.file_name for part in LIBRARIES)
        if not library or any(part in frame.file_name for part in OPTIMIZERS):
            found.setdefault(library, f"{PurePath(frame.file_name).name}:{frame.line_num}")
        if not library:
            break
    return found.get(False, LIBRARY), found.get(True, LIBRARY)


def line_of(eqn: Any) -> str:
    """Return the file and line of the user's code behind an equation, or `LIBRARY`."""
    return lines_of(eqn)[0]


def regions_of(jaxpr: Any) -> list[Any]:
    """Return every `shard_map` of a program."""
    return [eqn for eqn in equations(jaxpr) if eqn.primitive.name == "shard_map"]
