"""`jaxdist eject`: a config's training as one readable file of plain JAX."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Sequence
from pathlib import Path

from jaxdist.commands.eject.assemble import assemble
from jaxdist.commands.eject.facts import facts_of
from jaxdist.commands.eject.refuse import check
from jaxdist.errors import ConfigError
from jaxdist.experiment import build, load


def eject(path: Path, overrides: Sequence[str] = (), *, out: Path | None = None) -> str:
    """The text of a file that trains as `jaxdist train` does, to the same losses.

    Args:
      out: the file to write, besides.

    Raises:
      ConfigError: settings that it does not write, all at once; a file that is there already or
        cannot be written; what `load` and `build` raise.
    """
    document, config = load(path, overrides)
    check(config)
    facts = facts_of(build(config, document))
    words = map(shlex.quote, ["jaxdist", "eject", str(path), *overrides])
    lines = textwrap.wrap(" ".join(words), 94, break_long_words=False, break_on_hyphens=False)
    command = " \\\\\n      ".join(lines)
    docstring = (
        f"{path.parent.name}/{path.stem} in plain JAX: all of its training, in one file.\n\n"
        f"Written by\n\n    {command}\n\nand yours to change. Its losses are those of `jaxdist "
        "train` with the same settings; it keeps no\ncheckpoints, and runs in one process.\n"
    )
    text = assemble(docstring, facts.pieces, facts.flags, facts.values)
    if out is not None:
        _write(text, out)
    return text


def _write(text: str, out: Path) -> None:
    try:
        with out.open("x") as file:  # never over a file that someone may have changed
            file.write(text)
    except FileExistsError as error:
        raise ConfigError(f"{out} is there already; move it away, or give another --out") from error
    except OSError as error:
        raise ConfigError(
            f"{out} cannot be written: {error.strerror}; give another --out"
        ) from error
