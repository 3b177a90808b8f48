"""Settings of the processes of a run: addresses, who may talk to them, and how long they wait."""

from __future__ import annotations

import ipaddress
from typing import Annotated

from pydantic import Field, PositiveFloat, model_validator

from jaxdist.config.schema import Config, FilePath

Port = Annotated[int, Field(ge=0, le=65535)]


class TlsConfig(Config):
    """Certificates, for servers and workers alike; each side asks the other for its own."""

    authority: FilePath
    """PEM file of the authority that signed all of them."""
    certificate: FilePath
    """PEM file of this side's certificate; a server's names the host that workers connect to."""
    key: FilePath
    """PEM file of its private key, which only its owner may read."""


class ProcessesConfig(Config):
    """Servers, aggregators of racks and workers as processes of this machine."""

    host: str = "127.0.0.1"
    """Address that servers listen on; one of a network needs tls."""
    port: Port = 0
    """Of server 0; the next ones have the next ports, and then the racks' aggregators, each as many
    as there are servers. 0 takes free ones."""
    token: FilePath | None = None
    """File with the token that workers must know; null makes a new one for each run."""
    tls: TlsConfig | None = None
    """Certificates; null talks in the clear, on this machine alone."""
    shared_memory: bool = True
    """Whether parameters and changes go through memory that a worker and a server of this machine
    share, which takes four times as many bytes as the shard for each worker; false sends them
    through the socket, as do hosts that are not this machine."""
    deadline_seconds: PositiveFloat = 600.0
    """A worker that all have waited for so long is ended, and another takes its place; whoever
    waits twice as long gives up, and says who is late."""
    retry_seconds: PositiveFloat = 30.0
    """A message without an answer for so long is sent again."""
    deaths: Annotated[int, Field(ge=1, le=100)] = 3
    """How often in a row a worker may die without a step in between, before the run ends."""

    @model_validator(mode="after")
    def _stays_here(self) -> ProcessesConfig:
        if self.tls is None and not is_loopback(self.host):
            raise ValueError(
                f"host {self.host} is reached over a network, where anyone on the way could read "
                "the token and change gradients: give certificates (tls: {authority, certificate, "
                "key}), or host 127.0.0.1"
            )
        return self


def is_loopback(host: str) -> bool:
    """Whether an address never leaves this machine; a name is taken for one that does.

    >>> [is_loopback(host) for host in ("127.0.0.1", "::1", "localhost", "0.0.0.0", "10.0.0.1")]
    [True, True, True, False, False]
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
