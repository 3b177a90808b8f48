"""The import of the user's objects by import path, such as `mypkg.model:build`."""

from __future__ import annotations

import importlib
import importlib.util
import os
import pkgutil
import sys
import sysconfig
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, NoReturn

from jaxdist.errors import ConfigError, JaxdistError, closest
from jaxdist.types import Json

_NOT_THE_USERS = (
    str(Path(__file__).parents[1]),
    *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
    # Packages are also in other entries of `sys.path` if a virtual environment includes another
    # environment.
    *(path for path in sys.path if path.endswith(("site-packages", "dist-packages"))),
    "<",  # Frozen modules have names such as <frozen importlib._bootstrap> instead of paths.
)


def load_object(path: str) -> Any:
    """Import and return the object at `module:name`; the current directory is searched first.

    The name may contain dots, for an attribute of a class or of a namespace.

    >>> load_object("math:gcd")(12, 18)
    6

    Raises:
      ConfigError: the path has another form, the module or the name does not exist, or the import
        of the module fails.
    """
    module_name, colon, attribute = path.partition(":")
    parts = (*module_name.split("."), *attribute.split("."))
    if not colon or not all(part.isidentifier() for part in parts):
        raise ConfigError(
            f"import path {path!r}: expected 'package.module:name', as in 'mypkg.model:build'"
        )
    # For an installed command, the first entry is the folder of the command and not the current
    # directory.
    if sys.path[:1] not in ([""], ["."]):
        sys.path.insert(0, "")
    found = _import_module(module_name, path)
    for name in attribute.split("."):
        if not hasattr(found, name):
            _no_attribute(path, found, name)
        found = getattr(found, name)
    return found


def call_object(path: str, found: Any, args: Mapping[str, Json]) -> Any:
    """Return `found(**args)`; an error inside the call is reported with its file and line.

    Raises:
      ConfigError: `found` cannot be called, refuses the arguments, or raises an error.
    """
    if not callable(found):
        raise ConfigError(
            f"import path {path!r}: {type(found).__name__} object is not callable: name a function "
            "or a class"
        )
    shown = ", ".join(f"{name}={_short(value)}" for name, value in args.items())
    with user_code(f"import path {path!r}: calling it with ({shown})"):
        return found(**args)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 and "\n" not in text else f"<{type(value).__name__}>"


@contextmanager
def user_code(what: str) -> Iterator[None]:
    """Convert errors of the user's code inside the block to a ConfigError.

    Args:
      what: the beginning of the message, which names the code.

    Raises:
      ConfigError: the code raised an error.
    """
    try:
        yield
    except JaxdistError:
        raise
    except Exception as error:
        raise ConfigError(f"{what} raised {describe_exception(error)}") from error


def describe_exception(error: BaseException) -> str:
    """Return an exception's type, message and position: `IndexError: message (file.py:12)`.

    The position is the line of the innermost frame in the user's code. If no frame is in the user's
    code, it is the line of the innermost frame.
    """
    place = ""
    if isinstance(error, SyntaxError) and error.filename:
        place = f" ({error.filename}:{error.lineno})"
    elif frames := traceback.extract_tb(error.__traceback__):
        frame = next(
            (f for f in reversed(frames) if not f.filename.startswith(_NOT_THE_USERS)), frames[-1]
        )
        place = f" ({frame.filename}:{frame.lineno})"
    # Only the first paragraph of jax's messages is kept.
    message = error.msg if isinstance(error, SyntaxError) else str(error).split("\n\n")[0]
    return f"{type(error).__name__}: {message}{place}"


def _import_module(name: str, path: str) -> Any:
    try:
        return importlib.import_module(name)
    except Exception as error:
        # If `name` or one of its parents is missing, the path is wrong. Any other missing module is
        # imported inside the user's module.
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing and (name == missing or name.startswith(f"{missing}.")):
            _no_module(path, missing)
        raise ConfigError(
            f"import path {path!r}: module {name!r} raised {describe_exception(error)}"
        ) from error


def _no_module(path: str, missing: str) -> NoReturn:
    parent, _, leaf = missing.rpartition(".")
    # For the entry "", pkgutil would search the directory that was current when it first searched.
    everywhere = [entry or os.getcwd() for entry in sys.path]
    search = getattr(sys.modules.get(parent), "__path__", None) if parent else everywhere
    names = {module.name for module in pkgutil.iter_modules(search)} | (
        set() if parent else set(sys.stdlib_module_names)
    )
    match = closest(leaf, names)
    hint = f"; did you mean {f'{parent}.' if parent else ''}{match}?" if match else ""
    raise ConfigError(
        f"import path {path!r}: there is no module {missing!r}{hint} (searched: the current "
        "directory, PYTHONPATH and the installed packages)"
    ) from None


def _no_attribute(path: str, found: Any, name: str) -> NoReturn:
    owner = getattr(found, "__name__", type(found).__name__)
    match = closest(name, (other for other in dir(found) if not other.startswith("_")))
    hint = f"; did you mean {match!r}?" if match else ""
    raise ConfigError(f"import path {path!r}: {owner!r} has no attribute {name!r}{hint}")


def foreign_code(values: Json) -> list[str]:
    """Return a line for each of the user's modules that a config imports.

    The line has the file of the module, and the settings that import the module.

    The function imports no module. Modules of installed packages are left out.

    >>> foreign_code({"optim": {"type": "import", "path": "optax:lion"}})
    []
    """
    settings: dict[str, list[str]] = {}
    for setting, path in _import_paths(values, ""):
        settings.setdefault(path.partition(":")[0].partition(".")[0], []).append(setting)
    lines = []
    for top, names in settings.items():
        found = PathFinder.find_spec(top, ["", *sys.path])
        places = [] if found is None else [found.origin, *(found.submodule_search_locations or ())]
        place = next((one for one in places if one), None)
        if place is not None and not place.startswith(_NOT_THE_USERS):
            lines.append(f"imports {Path(place).absolute()} for {', '.join(names)}")
    return lines


def _import_paths(values: Json, where: str) -> Iterator[tuple[str, str]]:
    if isinstance(values, dict):
        if values.get("type") == "import" and isinstance(values.get("path"), str):
            yield where, values["path"]
        for key, value in values.items():
            yield from _import_paths(value, f"{where}.{key}" if where else str(key))
    elif isinstance(values, list):
        for index, value in enumerate(values):
            yield from _import_paths(value, f"{where}.{index}")
