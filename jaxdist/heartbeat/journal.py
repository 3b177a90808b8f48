"""The journal of an agent about its generations: the file RUN/elastic.jsonl."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from pathlib import Path

from jaxdist.config.files import parse_json, read_regular
from jaxdist.errors import RunError
from jaxdist.heartbeat.run_folder import RunFolder
from jaxdist.types import Json, JsonObject

FILE_NAME = "elastic.jsonl"


class Journal:
    """A journal that keeps events until the run directory is known, and then writes its file."""

    def __init__(self) -> None:
        self._kept: list[JsonObject] = []

    def add(self, run_folder: RunFolder, event: str, **what: Json) -> None:
        """Add an event of a generation, as a line with the values `what`."""
        line = {"time": time.time(), "generation": run_folder.generation, "event": event, **what}
        self._kept.append(line)
        # Events stay in memory if no process has published the directory yet, or if the disk is
        # full.
        with suppress(OSError):
            path = run_folder.run_directory() / FILE_NAME
            with path.open("a", encoding="utf-8") as file:
                for one in self._kept:
                    file.write(json.dumps(one) + "\n")
            self._kept = []


def read_journal(run: Path) -> list[JsonObject]:
    """Return the events of a run's generations in order, or [] for a run without an agent.

    Raises:
      RunError: the journal cannot be read.
    """
    try:
        lines = read_regular(run / FILE_NAME).splitlines()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise RunError(
            f"{run / FILE_NAME} cannot be read: {error.strerror or error}; restore or remove "
            "the file"
        ) from error
    events = []
    for line in lines:
        with suppress(ValueError):  # The last line may be incomplete, if the agent was killed.
            event = parse_json(line)
            if isinstance(event, dict) and isinstance(event.get("event"), str):
                events.append(event)
    return events
