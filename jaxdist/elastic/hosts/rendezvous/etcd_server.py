"""A rendezvous on etcd, whose transactions over HTTP swap the hosts' token atomically.

The cluster may have several members, of which a majority must be alive. Since etcd is linearizable,
a swap that etcd acknowledged is never lost. Each value has a key below `/jaxdist/NAME/`. No key
expires: as with every kind of rendezvous, the leases and the leader election of the hosts use only
swaps of the token.
"""

from __future__ import annotations

import base64
import http.client
import json
import os
import ssl
from collections.abc import Mapping
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
from jaxdist.errors import ConfigError
from jaxdist.types import Json

CA, CERTIFICATE, KEY = (f"JAXDIST_ETCD_{name}" for name in ("CA", "CERTIFICATE", "KEY"))
SECONDS = 5.0
"""The time, in seconds, within which a member must answer; after this time the next member is
asked."""


class EtcdRendezvous(Rendezvous):
    """A `jaxdist.elastic.hosts.rendezvous.contract.Rendezvous` on an etcd cluster.

    Args:
      address: the address etcd://HOST:PORT[,HOST:PORT...]. An address with TLS begins with
        etcds://. An address ends with `#NAME` if another run uses the same cluster. With TLS,
        environment variables name the files of the authority (JAXDIST_ETCD_CA) and of this host's
        certificate and key (JAXDIST_ETCD_CERTIFICATE, JAXDIST_ETCD_KEY).

    Raises:
      ConfigError: the address has no host, a member on another machine lacks TLS, or a file of the
        environment is missing.
      RendezvousError: no member of the cluster answers.
    """

    def __init__(self, address: str) -> None:
        url, name = urldefrag(address)
        self.address, self._prefix = address, f"/jaxdist/{name or 'run'}/"
        self._members, self._tls = members(url), None
        if url.startswith("etcds://"):
            self._tls = tls_context(os.environ)
        # Only the first host creates the token; the key has version 0 if it does not exist.
        self._swap("version", 0, str(Token(token_hex(16))))

    def token(self) -> str:
        """Return the current token of the rendezvous."""
        found = self._range("token")
        if not found:
            raise LostError(self.address)
        return found[0][1]

    def compare_and_swap(self, seen: str, new: str) -> bool:
        """Compare and swap the token in a transaction, and return whether the swap succeeded.

        The cluster commits the transaction atomically. If no answer arrives, the swap may
        nevertheless have succeeded. The method then reads the token, and returns True if the token
        is `new`, since no other host writes `new`. Otherwise the error is raised.

        Args:
          seen: the token that the caller expects.
          new: the token that replaces it.
        """
        try:
            return self._swap("value", _coded(seen), new)
        except RendezvousError:
            if self.token() == new:
                return True
            raise

    def put(self, name: str, value: Json) -> None:
        """Write a value under its key."""
        self._call("kv/put", {"key": self._key(name), "value": _coded(json.dumps(value))})

    def get(self, name: str) -> Json:
        """Return the value with the given name, or None if there is no such value."""
        found = self._range(name)
        return json.loads(found[0][1]) if found else None

    def names(self, kind: str) -> list[str]:
        """Return the names of all values of a kind."""
        # The range is from `kind/` up to `kind0`, since 0 is the character after /.
        found = self._range(f"{kind}/", until=f"{kind}0", keys_only=True)
        return sorted(key.removeprefix(f"{self._prefix}{kind}/") for key, _ in found)

    def drop(self, name: str) -> None:
        """Delete the value with the given name."""
        self._call("kv/deleterange", {"key": self._key(name)})

    def _key(self, name: str) -> str:
        return _coded(self._prefix + name)

    def _range(
        self, name: str, *, until: str | None = None, keys_only: bool = False
    ) -> list[tuple[str, str]]:
        asked: dict[str, Json] = {"key": self._key(name), "keys_only": keys_only}
        if until is not None:
            asked["range_end"] = self._key(until)
        found = self._call("kv/range", asked).get("kvs", [])
        return [(_text(one["key"]), _text(one.get("value", ""))) for one in found]

    def _swap(self, target: str, seen: Json, new: str) -> bool:
        key = self._key("token")
        compare = {"key": key, "target": target.upper(), "result": "EQUAL", target: seen}
        put = {"request_put": {"key": key, "value": _coded(new)}}
        return bool(self._call("kv/txn", {"compare": [compare], "success": [put]}).get("succeeded"))

    def _call(self, method: str, asked: Mapping[str, Json]) -> dict[str, Any]:
        """Return the answer of the first member that answers; later calls ask this member first."""
        problems: list[str] = []
        for member in [*self._members]:
            try:
                found = self._asked(member, f"/v3/{method}", json.dumps(asked))
            except (OSError, http.client.HTTPException, ValueError) as error:
                problems.append(f"{member}: {error}")
                self._members = [*self._members[1:], self._members[0]]
                continue
            return found
        raise RendezvousError(
            f"the rendezvous {self.address} cannot be reached: {'; '.join(problems)}; check that a "
            "majority of the etcd cluster runs and that this host can connect to the cluster"
        )

    def _asked(self, member: str, path: str, body: str) -> dict[str, Any]:
        # Each call opens a connection, since calls come from several threads, but only a few per
        # second.
        connection = (
            http.client.HTTPConnection(member, timeout=SECONDS)
            if self._tls is None
            else http.client.HTTPSConnection(member, timeout=SECONDS, context=self._tls)
        )
        try:
            connection.request("POST", path, body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            text = answer.read()
        finally:
            connection.close()
        if answer.status != 200:
            raise ValueError(f"HTTP {answer.status}: {text[:200].decode(errors='replace')}")
        return json.loads(text)


def members(url: str) -> list[str]:
    """Return the members that an address names, as HOST:PORT.

    >>> members("etcd://127.0.0.1:2379,localhost:2381")
    ['127.0.0.1:2379', 'localhost:2381']

    Raises:
      ConfigError: a member lacks a host or a port, or is on another machine and lacks TLS.
    """
    scheme, _, rest = url.partition("://")
    found = rest.rstrip("/").split(",")
    for member in found:
        try:
            parts = urlsplit(f"//{member}")
            host, port = parts.hostname, parts.port
        except ValueError:
            host = port = None
        if not host or port is None or "@" in member:
            raise ConfigError(
                f"--rendezvous {url}: {member!r} is not HOST:PORT; hosts authenticate with a "
                f"certificate ({CERTIFICATE}), not with a name and a password"
            )
        if scheme != "etcds" and host != "localhost" and not is_loopback(host):
            raise ConfigError(
                f"the rendezvous {url} is on another machine and lacks TLS (etcds://); anyone who "
                "can connect to the rendezvous could take over the run. Use an address that begins "
                "with etcds://"
            )
    return found


def tls_context(environ: Mapping[str, str]) -> ssl.SSLContext:
    """Return the TLS settings from the files that the environment names.

    Raises:
      ConfigError: a variable is missing, or a file cannot be read. The certificate of the host is
        required, since otherwise anyone who reaches the cluster could take over the run.
    """
    missing = [name for name in (CA, CERTIFICATE, KEY) if name not in environ]
    if missing:
        raise ConfigError(
            f"--rendezvous etcds://: set {', '.join(missing)}: these environment variables name "
            f"files, and {CA} names the certificate of the authority, {CERTIFICATE} and {KEY} name "
            "this host's certificate and key"
        )
    paths = [Path(environ[name]) for name in (CA, CERTIFICATE, KEY)]
    try:
        context = ssl.create_default_context(cafile=paths[0])
        context.load_cert_chain(paths[1], paths[2])
    except OSError as error:
        given = ", ".join(map(str, paths))
        raise ConfigError(f"--rendezvous etcds://: {given} cannot be used: {error}") from error
    return context


def _coded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def _text(coded: str) -> str:
    return base64.b64decode(coded).decode()
