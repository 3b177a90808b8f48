"""The construction of an agent from the arguments of `jaxdist agent`."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from secrets import token_hex

from jaxdist.checkpoint.identity import Identity, base_of, read_identity, run_directories
from jaxdist.checkpoint.local import local_folder
from jaxdist.config import Document, read, validate
from jaxdist.elastic.agent import Agent, AgentSettings
from jaxdist.elastic.hosts.identity import compatibility
from jaxdist.elastic.hosts.join import Here
from jaxdist.elastic.hosts.multi_host import MultiHost
from jaxdist.elastic.hosts.rendezvous.address import open_rendezvous
from jaxdist.elastic.hosts.rendezvous.contract import Token
from jaxdist.errors import ConfigError, RunError, os_errors_as
from jaxdist.heartbeat.config import ElasticConfig
from jaxdist.heartbeat.fence import newest_of_all
from jaxdist.runtime.gpus import divide_gpus, look
from jaxdist.runtime.notices import PreemptionConfig
from jaxdist.types import JsonObject


def agent_of(
    config: Path,
    extra: list[str],
    *,
    rendezvous: str,
    least: int,
    most: int,
    processes: int,
    host: str | None,
    token_file: Path | None,
    resume: bool,
    restarts: int,
    seconds: float,
    say: Callable[[str], None],
    fork_module: str,
    json_file: Path | None = None,
) -> Agent:
    """Build the agent of this machine.

    Args:
      config: the config file, with the overrides `extra`.
      rendezvous: the address at which all hosts meet.
      least, most: the smallest and the largest number of hosts in a generation.
      processes: the number of processes on this machine.
      host: the NAME or NAME/ADDRESS of this host; None takes this machine's name.
      token_file: the file with the token that all hosts share; None takes the secret of the
        rendezvous.
      resume: whether the first generation continues a saved run.
      restarts: the number of consecutive generations that may fail without a new step before the
        run fails.
      seconds: the time to wait for enough hosts, in seconds.
      fork_module: see `jaxdist.elastic.agent.Agent`.
      json_file: the file to which process 0 writes the result of the run, on the host of process 0,
        or None to write none.

    Raises:
      JaxdistError: the agent cannot be built for a reason that the user can correct.
    """
    if least > most:
        raise ConfigError(f"--min {least} is above --max {most}: lower --min, or raise --max")
    document = read(config, extra)
    values = document.values
    elastic = validate(Document(values.get("elastic") or {}), ElasticConfig)
    membership = elastic.membership(least, most)
    name, address = split_host(host or platform.node())
    token = None if token_file is None else read_host_token(token_file)
    meeting = open_rendezvous(rendezvous)
    drawn = Token.parse(meeting.token()).name
    settings = {"--min": least, "--max": most}
    shared = token or meeting.secret()
    here = Here(
        f"{re.sub('[^A-Za-z0-9-]', '-', name)}-{token_hex(4)}",
        name,
        address,
        processes,
        local_device_count(values, os.environ, processes),
        shared,
    )
    directory = (values.get("run") or {}).get("directory")
    base = base_of(Path(directory) if directory else None, config)
    hosts = MultiHost(
        meeting,
        membership,
        here,
        compatibility(values, settings, name, drawn, shared),
        values,
        say,
        seconds=seconds,
        resume=resume,
        before=newest_of_all(base),
        local=partial(
            local_of, values, base, exact=document.origin(("run", "directory")).overrides
        ),
    )
    args = {"config": str(config), "extra": extra}
    args |= {} if json_file is None else {"json_file": str(json_file)}
    told = (values.get("run") or {}).get("preemption") or {}
    notices = validate(Document(told), PreemptionConfig).build(say)
    plan = AgentSettings(args, processes, restarts, notices=notices)
    return Agent(plan, say, fork_module=fork_module, hosts=hosts)


def local_of(
    values: JsonObject, base: Path, run: Identity | None, *, exact: bool = False
) -> Path | None:
    """Return the folder with the run's snapshots on this machine's disk, or None without snapshots.

    Args:
      base: the run directory that the config names.
      run: the run that the other hosts train, or None if it is unknown. If the run is unknown, the
        only run at `base` is used; if there are several runs, the first process refuses to start.
      exact: whether `base` itself is the run directory.

    >>> values = {"checkpoint": {"local": {"directory": "/ssd"}}}
    >>> local_of(values, Path("gpt"), Identity("86bcf769", Path("/runs/gpt")))
    PosixPath('/ssd/gpt-86bcf769')
    """
    local = (values.get("checkpoint") or {}).get("local") or {}
    if "directory" not in local:
        return None
    if run is None or run.path is None:
        begun = [path for path in run_directories(base) if path == base or not exact]
        run = read_identity(begun[0]) if len(begun) == 1 else None
    return None if run is None else local_folder(Path(local["directory"]), run)


def split_host(text: str) -> tuple[str, str]:
    """Return the name and the address of a host from NAME or NAME/ADDRESS.

    >>> split_host("rack1-a/10.0.0.7"), split_host("node1")
    (('rack1-a', '10.0.0.7'), ('node1', 'node1'))

    Raises:
      ConfigError: the name or the address is missing.
    """
    name, slash, address = text.partition("/")
    if not name or (slash and not address):
        raise ConfigError(f"--host {text!r} is not NAME or NAME/ADDRESS")
    return name, address or name


def read_host_token(path: Path) -> bytes:
    """Return the shared token from a file.

    Raises:
      RunError: the file cannot be read, or the token is too short.
    """
    with os_errors_as(
        RunError,
        f"--token-file {path} cannot be read",
        "use a file that has the token of all hosts",
    ):
        token = path.read_bytes().strip()
    if len(token) < 16:
        raise RunError(
            f"--token-file {path} has {len(token)} bytes: use a token of at least 16 bytes that "
            "cannot be guessed, for example from `openssl rand -hex 32`"
        )
    return token


def local_device_count(values: JsonObject, environ: Mapping[str, str], processes: int) -> int:
    """Return the number of devices that each process of this machine has, without starting JAX.

    The visible GPUs are divided equally among the processes.

    >>> local_device_count({"mesh": {"fake_devices": 4}}, {}, 2)
    4

    Raises:
      RunError: the GPUs cannot be counted, or cannot be divided among the processes.
    """
    fake = (values.get("mesh") or {}).get("fake_devices")
    if isinstance(fake, int):
        return max(fake, 1)
    if environ.get("JAX_PLATFORMS", "").startswith("cpu"):
        return 1
    share = divide_gpus([look(environ, environ.get("JAX_PLATFORMS"))] * processes)[0]
    chips = [name for name in os.listdir("/dev") if re.fullmatch(r"accel\d+", name)]
    return len(share) or len(chips) or 1
