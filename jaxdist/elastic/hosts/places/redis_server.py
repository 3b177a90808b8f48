"""A rendezvous on a Redis server: the token is a string that a script swaps, a kind is a hash.

One server: a replica that takes over may lack the last writes, and with them a swap that was
answered. Its data need not outlive it: a server that comes back empty has another token's name, by
which each agent sees it, and no lease of before is granted again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from secrets import token_hex
from typing import Any
from urllib.parse import urldefrag, urlsplit

from jaxdist.elastic.hosts.places.contract import LostError, RendezvousError, Token
from jaxdist.errors import ConfigError
from jaxdist.types import Json

SECONDS = 5.0
"""Of an answer."""
_SWAP = """
if redis.call('get', KEYS[1]) == ARGV[1] then
  redis.call('set', KEYS[1], ARGV[2])
  return 1
end
return 0
"""


class RedisRendezvous:
    """See `jaxdist.elastic.hosts.places.contract.Rendezvous`.

    Args:
      address: redis://[:PASSWORD@]HOST:PORT/DB, rediss:// for TLS, and `#NAME` for another run on
        the same server.

    Raises:
      ConfigError: the package redis is not installed.
      RendezvousError: the server cannot be reached.
    """

    def __init__(self, address: str) -> None:
        try:
            import redis
            from redis.exceptions import RedisError
        except ImportError:
            raise ConfigError(
                f"the rendezvous {shown(address)} needs the package redis: pip install "
                "'jaxdist[redis]', or choose a directory that all hosts see"
            ) from None
        url, name = urldefrag(address)
        self.address = shown(address)
        self._prefix = f"jaxdist:{name or 'run'}"
        self._error = RedisError
        given = {"socket_timeout": SECONDS, "socket_connect_timeout": SECONDS}
        with self._told():
            # Typed as what may also be awaited, which this one never is.
            self._server: Any = redis.Redis.from_url(url, decode_responses=True, **given)
            self._server.set(f"{self._prefix}:token", str(Token(token_hex(16))), nx=True)

    def token(self) -> str:
        """The token as it is now."""
        with self._told():
            found = self._server.get(f"{self._prefix}:token")
        if found is None:
            raise LostError(self.address)
        return found

    def swap(self, seen: str, new: str) -> bool:
        """Compare and set, in the server."""
        with self._told():
            return bool(self._server.eval(_SWAP, 1, f"{self._prefix}:token", seen, new))

    def put(self, name: str, value: Json) -> None:
        """Set a field of the kind's hash."""
        kind, _, key = name.partition("/")
        with self._told():
            self._server.hset(f"{self._prefix}:{kind}", key, json.dumps(value))

    def get(self, name: str) -> Json:
        """A value; None where there is none."""
        kind, _, key = name.partition("/")
        with self._told():
            found = self._server.hget(f"{self._prefix}:{kind}", key)
        return None if found is None else json.loads(found)

    def names(self, kind: str) -> list[str]:
        """Names of all values of a kind."""
        with self._told():
            return sorted(self._server.hkeys(f"{self._prefix}:{kind}"))

    def drop(self, name: str) -> None:
        """Remove a value."""
        kind, _, key = name.partition("/")
        with self._told():
            self._server.hdel(f"{self._prefix}:{kind}", key)

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except (self._error, OSError, ValueError) as error:
            raise RendezvousError(
                f"the rendezvous {self.address} cannot be reached: {error}; see that the server "
                "runs and that this host may connect to it"
            ) from error


def shown(address: str) -> str:
    """An address without its password.

    >>> shown("redis://:secret@node1:6379/0#mine")
    'redis://node1:6379/0#mine'
    """
    parts = urlsplit(address)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
