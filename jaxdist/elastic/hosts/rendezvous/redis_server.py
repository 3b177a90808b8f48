"""A rendezvous on a Redis server: a script swaps the token, and a hash holds each kind of value.

The server must be a single server without replicas. A replica that takes over may lack the last
writes, and one of these writes may be a swap that was acknowledged. The data need not survive a
restart. After a restart without data, there is no token, or a host has created a token with a new
name. Every agent notices either case, and no earlier lease is granted again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from secrets import token_hex
from typing import Any
from urllib.parse import urldefrag, urlsplit

from jaxdist.elastic.hosts.rendezvous.contract import (
    LostError,
    Rendezvous,
    RendezvousError,
    Token,
    is_loopback,
)
from jaxdist.errors import ConfigError, os_errors_as
from jaxdist.types import Json

PASSWORD, PASSWORD_FILE = "JAXDIST_REDIS_PASSWORD", "JAXDIST_REDIS_PASSWORD_FILE"
SECONDS = 5.0
"""The time within which the server must answer, in seconds."""
_SWAP = """
if redis.call('get', KEYS[1]) == ARGV[1] then
  redis.call('set', KEYS[1], ARGV[2])
  return 1
end
return 0
"""


class RedisRendezvous(Rendezvous):
    """A `jaxdist.elastic.hosts.rendezvous.contract.Rendezvous` on a Redis server.

    Args:
      address: the address redis://[:PASSWORD@]HOST:PORT/DB. An address with TLS begins with
        rediss://. An address ends with `#NAME` if another run uses the same server. A password is
        safer in the environment (`find_password`) than in the address, since other users can see
        the address in the list of processes.

    Raises:
      ConfigError: the package redis is not installed, or a server on another machine lacks TLS or a
        password.
      RendezvousError: the server cannot be reached.
    """

    def __init__(self, address: str) -> None:
        try:
            import redis
            from redis.exceptions import RedisError
        except ImportError:
            raise ConfigError(
                f"the rendezvous {_shown(address)} needs the package redis: pip install "
                "'jaxdist[redis]', or choose a directory that all hosts share"
            ) from None
        url, name = urldefrag(address)
        password = find_password(os.environ)
        check_secure(url, password)
        self.address = _shown(address)
        self._prefix = f"jaxdist:{name or 'run'}"
        self._error = RedisError
        given: Any = {"socket_timeout": SECONDS, "socket_connect_timeout": SECONDS}
        if password is not None:
            given["password"] = password
        with self._told():
            # The type is `Any`, because the declared type includes awaitables, which this
            # synchronous client never returns.
            self._server: Any = redis.Redis.from_url(url, decode_responses=True, **given)
            # With `nx`, only the first host creates the token; the calls of other hosts change
            # nothing.
            self._server.set(f"{self._prefix}:token", str(Token(token_hex(16))), nx=True)

    def token(self) -> str:
        """Return the current token of the rendezvous."""
        with self._told():
            found = self._server.get(f"{self._prefix}:token")
        if found is None:
            raise LostError(self.address)
        return found

    def compare_and_swap(self, seen: str, new: str) -> bool:
        """Compare and swap the token in a script, which the server runs atomically.

        Return whether the swap succeeded.

        Args:
          seen: the token that the caller expects.
          new: the token that replaces it.
        """
        with self._told():
            return bool(self._server.eval(_SWAP, 1, f"{self._prefix}:token", seen, new))

    def put(self, name: str, value: Json) -> None:
        """Write a value as a field of the Redis hash of its kind."""
        kind, _, key = name.partition("/")
        with self._told():
            self._server.hset(f"{self._prefix}:{kind}", key, json.dumps(value))

    def get(self, name: str) -> Json:
        """Return the value with the given name, or None if there is no such value."""
        kind, _, key = name.partition("/")
        with self._told():
            found = self._server.hget(f"{self._prefix}:{kind}", key)
        return None if found is None else json.loads(found)

    def names(self, kind: str) -> list[str]:
        """Return the names of all values of a kind."""
        with self._told():
            return sorted(self._server.hkeys(f"{self._prefix}:{kind}"))

    def drop(self, name: str) -> None:
        """Delete the value with the given name."""
        kind, _, key = name.partition("/")
        with self._told():
            self._server.hdel(f"{self._prefix}:{kind}", key)

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except (self._error, OSError, ValueError) as error:
            raise RendezvousError(
                f"the rendezvous {self.address} cannot be reached: {error}; check that the server "
                "runs and that this host can connect to the server"
            ) from error


def find_password(environ: Mapping[str, str]) -> str | None:
    """Return the password from the environment, or from the file that the environment names.

    Return None if the environment has neither.

    Raises:
      ConfigError: the file cannot be read.
    """
    path = environ.get(PASSWORD_FILE)
    if path is None:
        return environ.get(PASSWORD)
    with os_errors_as(
        ConfigError, f"{PASSWORD_FILE} {path} cannot be read", "name a file that this user may read"
    ):
        return Path(path).read_text(encoding="utf-8").strip()


def check_secure(url: str, password: str | None) -> None:
    """Check that other users of the network can neither read nor write the server's data.

    A client that can write to the server controls what the hosts of the run do, and can fetch the
    model's state.

    >>> check_secure("redis://localhost:6379", None)

    Raises:
      ConfigError: the server is on another machine, and lacks TLS or a password.
    """
    parts = urlsplit(url)
    host = parts.hostname or "localhost"
    if host == "localhost" or is_loopback(host):
        return
    lacking = [] if parts.scheme == "rediss" else ["TLS (rediss://)"]
    if not (parts.password or password):
        lacking.append(f"a password (set {PASSWORD_FILE} to a file with it, or {PASSWORD})")
    if lacking:
        raise ConfigError(
            f"the rendezvous {_shown(url)} is on another machine and lacks "
            f"{' and '.join(lacking)}; anyone who can connect to the rendezvous could take over "
            "the run"
        )


def _shown(address: str) -> str:
    """Return an address without its password, for messages.

    >>> _shown("redis://:secret@node1:6379/0#mine")
    'redis://node1:6379/0#mine'
    """
    parts = urlsplit(address)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
