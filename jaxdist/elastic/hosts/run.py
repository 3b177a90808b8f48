"""The run that the hosts of a rendezvous train, and whether it has ended.

    run/id     the id of the run that starts next, drawn by the host that plans its first generation
    run/path   the id and the directory of the run, once the run has started
    run/over   the result, id and directory of a run that ended, and a digest of its command

The first two values contain the number of a generation, and the directory that the config requests.
A value belongs to an earlier run, which has ended, if its generation is not newer than the
generation in `run/over`. A value belongs to another run if its directory differs.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from jaxdist.checkpoint.identity import Identity, new_id, read_identity
from jaxdist.elastic.hosts.rendezvous.contract import Rendezvous
from jaxdist.errors import RunError
from jaxdist.types import Json, JsonObject

ID, PATH, OVER = "run/id", "run/path", "run/over"


def ended_before(rendezvous: Rendezvous) -> int:
    """Return the generation in which a rendezvous's last run ended, or -1 if no run has ended.

    Raises:
      RendezvousError: the rendezvous cannot be reached.
    """
    over = rendezvous.get(OVER)
    return -1 if over is None else over["generation"]


def requested_directory(values: JsonObject) -> str | None:
    """Return the run directory that a config requests, or None if it requests none."""
    directory = (values.get("run") or {}).get("directory")
    return None if directory is None else str(directory)


def known_run(rendezvous: Rendezvous, ended: int, asked: str | None) -> Identity | None:
    """Return the run that started after the last run at a rendezvous ended.

    The result is None if no run has started since then.

    Args:
      ended: the generation in which the last run ended.
      asked: the run directory that the config requests (`requested_directory`), or None.

    Raises:
      RendezvousError: the rendezvous cannot be reached.
    """
    return _identity(rendezvous.get(PATH), ended, asked)


def run_to_begin(
    rendezvous: Rendezvous, ended: int, generation: int, asked: str | None
) -> Identity:
    """Return the run that a new generation trains; if the run has no id yet, draw a new id.

    Args:
      ended: the generation in which the last run ended.
      generation: the number of the new generation.
      asked: the run directory that the config requests (`requested_directory`), or None.

    Raises:
      RendezvousError: the rendezvous cannot be reached.
    """
    found = known_run(rendezvous, ended, asked) or _identity(rendezvous.get(ID), ended, asked)
    if found is None:
        found = Identity(new_id())
        rendezvous.put(ID, {"generation": generation, "asked": asked, **found.plain})
    return found


def tell_run(rendezvous: Rendezvous, generation: int, run: Identity, asked: str | None) -> None:
    """Publish which run has started.

    Args:
      generation: the number of the generation that started the run.
      asked: the run directory that the config requests (`requested_directory`), or None.

    Raises:
      RendezvousError: the rendezvous cannot be reached.
    """
    rendezvous.put(PATH, {"generation": generation, "asked": asked, **run.plain})


def finished(rendezvous: Rendezvous, values: Json) -> Identity | None:
    """Return the finished run that a command would train again, or None if there is no such run.

    The result is None if no run has ended well, if the config differs, or if the run's directory no
    longer exists.

    Args:
      values: the values of the command's config.

    Raises:
      RendezvousError: the rendezvous cannot be reached.
    """
    over = rendezvous.get(OVER)
    if over is None or over["code"] or over.get("command") != command_of(values):
        return None
    run = None if over.get("run") is None else Identity.of(over["run"])
    with suppress(RunError):
        here = None if run is None or run.path is None else read_identity(run.path)
        return run if here is not None and run is not None and here.id == run.id else None
    return None


def command_of(values: Json) -> str:
    """Return a digest of a config, which is equal on all agents with an equal config."""
    text = json.dumps(values, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _identity(told: Mapping[str, Any] | None, ended: int, asked: str | None) -> Identity | None:
    if told is None or told["generation"] <= ended or "id" not in told:
        return None
    if told["asked"] != asked:
        return None
    return Identity.of({**told})
