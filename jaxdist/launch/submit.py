"""The execution of a launch: jaxdist writes files, calls the engine, and later queries the job."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxdist.config.files import read_json, why_unread
from jaxdist.errors import RunError, os_errors_as
from jaxdist.launch.build import engine
from jaxdist.launch.contract import Engine, Job

RECORD = "launch.json"
SUBMIT_SECONDS = 120


@dataclass(frozen=True)
class Launched:
    """A launch that was started, with the contents of its record.

    Attributes:
      engine: the engine that runs the job.
      folder: the folder of the launch's files.
      identity: the name or number that the engine gave to the job, or an empty string if the
        command lasted as long as the job.
    """

    engine: Engine
    folder: Path
    identity: str


def _new_folder(base: Path, name: str) -> Path:
    """Create and return a folder with the first free name among NAME, NAME.2, NAME.3, ...

    Raises:
      RunError: the folder cannot be created.
    """
    number, folder = 1, base / name
    remedy = "start the launch in a directory in which you may write"
    while True:
        failed = f"the folder {folder} of the launch cannot be created"
        # `mkdir` fails if the folder exists, so that two launches at the same time never share a
        # folder.
        with os_errors_as(RunError, failed, remedy), suppress(FileExistsError):
            folder.mkdir(parents=True)
            return folder.absolute()
        number += 1
        folder = base / f"{name}.{number}"


def installed(one: Engine) -> None:
    """Check that an engine is installed on this machine.

    Raises:
      RunError: the engine is not installed; the message has the instructions to install it.
    """
    if shutil.which(one.program) is None:
        raise RunError(f"{one.program} is not installed here: {one.install}")


def launch(
    one: Engine, settings: Sequence[str], job: Job, base: Path, say: Callable[[str], None]
) -> tuple[Launched, int]:
    """Launch a job, and return the launch and the exit code of the engine's command.

    Args:
      one: the engine.
      settings: the texts from which the engine was built, for the record of the launch.
      job: the job to launch.
      base: the folder of all launches.
      say: the function that prints a line for the user.

    Raises:
      JaxdistError: the engine cannot run the job, is not installed, or has refused the job.
    """
    one.check(job)
    installed(one)
    folder = _new_folder(base, job.name)
    rendered = one.render(job, folder)
    for name, text in rendered.files.items():
        (folder / name).write_text(text)
    record = {"on": one.model_dump()["type"], "settings": [*settings], "identity": ""}
    _write(folder, record)
    say(f"launch {shlex.join(rendered.command)}")
    if rendered.waits:
        code = subprocess.run(rendered.command, cwd=job.folder, check=False).returncode
        return Launched(one, folder, ""), code
    done = _run(rendered.command, job.folder)
    found = re.search(one.identity, done, re.MULTILINE)
    if found is None:
        raise RunError(
            f"{rendered.command[0]} printed no name of the job: {done.strip()}. Look for the job "
            "in the scheduler's own list: the job may run although jaxdist cannot follow it"
        )
    _write(folder, {**record, "identity": found[1]})
    say(f"job {found[1]}: jaxdist launch status|logs|stop {_shown(folder)}")
    return Launched(one, folder, found[1]), 0


def _shown(folder: Path) -> Path:
    here = Path.cwd()
    return folder.relative_to(here) if folder.is_relative_to(here) else folder


def _write(folder: Path, record: dict[str, object]) -> None:
    (folder / RECORD).write_text(json.dumps(record, indent=1) + "\n")


def _run(command: Sequence[str], folder: Path) -> str:
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=SUBMIT_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise RunError(
            f"{command[0]} did not answer within {SUBMIT_SECONDS} s. Check whether the job is in "
            "the scheduler's own list before you submit it again"
        ) from None
    if done.returncode:
        words = (done.stderr or done.stdout).strip()
        raise RunError(f"{command[0]} refused the job (exit code {done.returncode}): {words}")
    return done.stdout


def launched(folder: Path) -> Launched:
    """Return the launch whose record is in a folder.

    Raises:
      RunError: the folder is not the folder of a launch.
    """
    try:
        record: Any = read_json(folder / RECORD)
        on, settings, identity = (record[key] for key in ("on", "settings", "identity"))
        return Launched(engine(on, settings), folder, identity)
    except (KeyError, TypeError):
        why = "the file lacks fields that `jaxdist launch` writes"
    except (OSError, ValueError) as error:
        why = why_unread(error)
    raise RunError(
        f"{folder} is not the folder of a launch: its file {RECORD} cannot be read ({why}); use "
        "the folder that `jaxdist launch` printed after the word job"
    )


def ask(what: str, folder: Path, *, capture: bool = False) -> subprocess.CompletedProcess[str]:
    """Run the engine's command `status`, `logs` or `stop` for a launched job; return its result.

    Args:
      what: the name of the command.
      folder: the folder of the launch.
      capture: whether to return the command's standard output instead of printing it.

    Raises:
      RunError: the engine has no such command, or is not installed.
    """
    found = launched(folder)
    command = found.engine.commands(found.identity, found.folder).get(what)
    if not command:
        kind = found.engine.model_dump()["type"]
        raise RunError(
            f"the engine {kind} does not support `jaxdist launch {what}`: the job ends with the "
            "command that started it"
        )
    installed(found.engine)
    output = subprocess.PIPE if capture else None
    return subprocess.run(command, check=False, stdout=output, text=True)
