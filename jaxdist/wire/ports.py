"""The addresses of servers, and a check that servers can listen on the configured ports."""

from __future__ import annotations

import socket

from jaxdist.errors import ConfigError

LAST_PORT = 65535

Place = int | str
"""The place of a server: a port of the run's host, or `host:port` on another host."""


def place_address(host: str, place: Place) -> str:
    """Return the address `host:port` of a place, given the run's host.

    >>> place_address("10.0.0.1", 40001), place_address("10.0.0.1", "10.0.0.2:40001")
    ('10.0.0.1:40001', '10.0.0.2:40001')
    """
    return place if isinstance(place, str) else address_of(host, place)


def address_of(host: str, port: int) -> str:
    """Return `HOST:PORT`, with brackets around an IPv6 address.

    >>> address_of("node1", 7000), address_of("fd00::1", 7000), address_of("[::1]", 7000)
    ('node1:7000', '[fd00::1]:7000', '[::1]:7000')
    """
    return f"[{host}]:{port}" if ":" in host.strip("[]") and "[" not in host else f"{host}:{port}"


def check_ports(host: str, port: int, servers: int, *, aggregators: int = 0) -> None:
    """Refuse ports that do not exist or are in use, before any process starts.

    Args:
      port: the port of the first server; the other servers take the next ports. With 0, servers
        take free ports, and nothing is checked.
      aggregators: the number of aggregators, whose ports follow; each aggregator takes as many
        ports as there are servers.

    Raises:
      ConfigError: a port cannot be used; the message has the port and the remedy.
    """
    if port == 0:
        return
    needed = servers * (1 + aggregators)
    if port + needed - 1 > LAST_PORT:
        who = f"{servers} servers" + (f" and {aggregators} aggregators" if aggregators else "")
        raise ConfigError(
            f"strategy.processes.port: {who} from port {port} on need ports up to "
            f"{port + needed - 1}, but {LAST_PORT} is the last: set {LAST_PORT + 1 - needed} or "
            "less, or 0 for free ports",
            setting=("processes", "port"),
        )
    for number in range(needed):
        reason = _refused(host.strip("[]"), port + number)
        if reason is not None:
            rack = number // servers - 1
            who = f"server {number}" if rack < 0 else f"aggregator {rack}"
            raise ConfigError(
                f"strategy.processes.port: {who} cannot listen on {host}, port {port + number}: "
                f"{reason}. Set the port to the first of several consecutive free ports (server 0 "
                "uses the first), or to 0 for any free ports",
                setting=("processes", "port"),
            )


def _refused(host: str, port: int) -> str | None:
    """Return the reason why a server cannot listen on a port, or None if it can."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as one:
            # gRPC also sets SO_REUSEADDR before it listens on a port.
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            one.bind(address)
            one.listen()
    except OSError as error:
        return (error.strerror or str(error)).lower()
    return None
