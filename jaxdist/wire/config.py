"""The settings of a run's processes: addresses, authentication and timeouts."""

from __future__ import annotations

import ipaddress
import socket
from typing import Annotated, Self

from pydantic import Field, PositiveFloat, model_validator

from jaxdist.config.schema import Config, FilePath

Port = Annotated[int, Field(ge=0, le=65535)]
OWN_NAME = "auto"
"""The value of the setting `host` that means the name of the host on which a server runs."""


class TlsConfig(Config):
    """The TLS certificates of servers and workers, which verify each other's certificates."""

    authority: FilePath
    """The PEM file of the certificate authority that signed all certificates."""
    certificate: FilePath
    """The PEM file of the certificate that a server or worker presents; a server's certificate
    names the host that workers connect to.
    """
    key: FilePath
    """The PEM file of the private key of `certificate`, which only its owner may read."""


class ProcessesConfig(Config):
    """The settings of the processes of a run: servers, aggregators of racks, and workers."""

    host: str = "127.0.0.1"
    """The address that servers listen on; an address of a network requires tls. auto is the name of
    the host of process 0, and for a server on another host the name of that host."""
    port: Port = 0
    """The first port, which server 0 takes. The other servers take the next ports, and then each
    rack's aggregator takes as many ports as there are servers. 0 takes any free ports."""
    remote_servers: Annotated[int, Field(ge=0)] = 0
    """The number of servers that other hosts start, by `jaxdist servers RUN --here`. The run waits
    for these servers before its first step, for deadline_seconds at most. Process 0 starts the rest
    of the servers. `jaxdist launch --servers` sets this number."""
    remote_workers: Annotated[int, Field(ge=0)] = 0
    """The number of workers that other hosts start in a run with parameter servers. `jaxdist train
    --distributed` sets this number: process 0 supervises the run, and each other process is a
    worker."""
    token: FilePath | None = None
    """The file with the token that workers present; null creates a new token for each run."""
    tls: TlsConfig | None = None
    """The TLS certificates; null sends plain text, on this machine only."""
    shared_memory: bool = True
    """Whether a worker and a server on this machine exchange parameters and changes through shared
    memory, which takes four times the shard's bytes for each worker; false sends them through the
    socket, as between machines."""
    deadline_seconds: PositiveFloat = 600.0
    """The time, in seconds, that other processes wait for a worker before the worker is killed and
    replaced. A process that waits twice as long fails, and its error names the late process."""
    retry_seconds: PositiveFloat = 30.0
    """The time without an answer, in seconds, after which a message is sent again."""
    deaths: Annotated[int, Field(ge=1, le=100)] = 3
    """The number of successive deaths of a worker, without a step in between, that ends the run."""

    @model_validator(mode="after")
    def _stays_here(self) -> ProcessesConfig:
        if self.tls is None and not stays_on_machine(self.host):
            raise ValueError(
                f"host {self.host} is reached over a network, where other users could read the "
                "token and change gradients: set certificates (tls: {authority, certificate, "
                "key}), or host 127.0.0.1"
            )
        if self.port and self.remote_servers:
            raise ValueError(
                f"port {self.port} does not work with remote_servers {self.remote_servers}: a "
                "server on another host takes any free port of its host; set port: 0"
            )
        return self

    def check_remote(self, servers: int, workers: int = 0) -> None:
        """Check that other hosts start no more servers and workers than a run has.

        Args:
          servers, workers: the numbers of servers and of workers of the run.

        Raises:
          ValueError: `remote_servers` is larger than `servers`, or `remote_workers` than `workers`.
        """
        for what, most in (("servers", servers), ("workers", workers)):
            name = f"remote_{what}"
            found = getattr(self, name)
            if found > most:
                raise ValueError(
                    f"{name} {found} exceeds the {most} {what} of the run: set {name}: {most} or "
                    "less"
                )

    def listening_on(self, host: str) -> Self:
        """Return these settings with another value of `host`."""
        return self.model_copy(update={"host": host})


def address_here(host: str) -> str:
    """Return the address that a value of the setting `host` means on this host.

    For auto the address is the name of this host.

    >>> address_here("10.0.0.1")
    '10.0.0.1'
    """
    return socket.gethostname() if host == OWN_NAME else host


def stays_on_machine(host: str) -> bool:
    """Return whether only this machine can reach an address.

    For a name, the result is true only if the name is localhost.

    >>> [stays_on_machine(host) for host in ("127.0.0.1", "::1", "localhost", "10.0.0.1")]
    [True, True, True, False]
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
