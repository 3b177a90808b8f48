"""`jaxdist eject`: the training of a config as a readable file of plain JAX."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from jaxdist.commands.eject.assemble import assemble_file
from jaxdist.commands.eject.facts import contents_of
from jaxdist.commands.eject.refuse import check_built, check_ejectable
from jaxdist.errors import ConfigError, os_errors_as
from jaxdist.experiment import build, load

Keep = Literal["data"]
"""The parts of an ejected file that jaxdist may provide."""
MOST_LINES = 300
"""The largest number of lines of a file. A longer file is written without the evaluation. If the
file is then still longer, blank lines not counted, the config is refused."""


def eject(
    path: Path, overrides: Sequence[str] = (), *, keep: Keep | None = None, out: Path | None = None
) -> str:
    """Return the text of a file that trains to the same losses as `jaxdist train`.

    Args:
      path: the configuration file, to which `overrides` are applied.
      keep: the part that the file imports from jaxdist, or None for no part.
      out: a file to which the text is written, or None to write none.

    Raises:
      ConfigError: settings are not supported (the message lists them); the file would be too long;
        or `out` exists or cannot be written.
      JaxdistError: the config cannot be read or built.
    """
    document, config = load(path, overrides)
    check_ejectable(config, keeps_data=keep == "data")
    experiment = build(config, document)
    check_built(experiment)
    kept = [] if keep is None else ["--keep", keep]
    words = map(shlex.quote, ["jaxdist", "eject", str(path), *overrides, *kept])
    lines = textwrap.wrap(" ".join(words), 90, break_long_words=False, break_on_hyphens=False)
    command = " \\\\\n      ".join(lines)
    docstring = (
        f"{path.parent.name}/{path.stem} as one file of plain JAX, written by\n\n    {command}\n\n"
        "Its losses equal those of `jaxdist train`. It is one process, without checkpoints.\n"
    )
    text = ""
    for held in (experiment.heldout is not None, False):
        facts = contents_of(experiment, held=held, keeps_data=keep == "data")
        text = assemble_file(docstring, facts.pieces, facts.flags, facts.values)
        if len(text.splitlines()) <= MOST_LINES:
            break
    lines = sum(map(bool, text.splitlines()))
    if lines > MOST_LINES:
        raise ConfigError(
            f"eject: the file would have {lines} lines, but a file has at most {MOST_LINES} lines; "
            "let jaxdist read the data (--keep data), or leave out settings that you do not need"
        )
    if out is not None:
        _write(text, out)
    return text


def _write(text: str, out: Path) -> None:
    with os_errors_as(ConfigError, f"{out} cannot be written", "choose another file with --out"):
        if out.exists():
            raise ConfigError(
                f"{out} exists already; move the file away, or choose another file with --out"
            )
        # The mode "x" refuses to overwrite a file, which a user may have edited.
        with out.open("x") as file:
            file.write(text)
