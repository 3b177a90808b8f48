"""Transfer of snapshot parts between hosts over TCP, for replicas and for new hosts.

Before any byte of a file is sent, both sides prove that they know the shared token: each side signs
its message together with the nonce of the other side (HMAC-SHA256). The receiver compares the
content with the signed digest. Nothing is encrypted: an attacker on the network can read the state,
but cannot change it unnoticed.

    client: nonce                         server: nonce
    client: {"want": NAME, "mac": ...}    server: {"bytes": N, "blake2b": ..., "mac": ...}, bytes
"""

from __future__ import annotations

import hashlib
import hmac
import io
import json
import os
import secrets
import shutil
import socket
import socketserver
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any

from jaxdist.checkpoint.layout import snapshot_of
from jaxdist.config.files import parse_json
from jaxdist.elastic.hosts.rendezvous.contract import is_loopback
from jaxdist.errors import RunError
from jaxdist.types import JsonObject

SECONDS = 10.0
"""The time of silence that ends a transfer, in seconds."""
_NONCE, _LINE_BYTES, _BLOCK_BYTES = 32, 1 << 20, 1 << 20
_REQUEST_BYTES = 1024
"""The largest number of bytes that a client may send before the server has checked its signature.
"""
LIST = "*"
"""The name that a client sends to request the list of all parts."""


class CopyError(RunError):
    """The error for a part of a snapshot that could not be copied from another host."""


class CopyServer:
    """A server that sends the parts in a folder to clients that have the token, until `close`.

    Args:
      host: the name or address, IPv4 or IPv6, at which the other hosts reach this machine.
    """

    def __init__(self, folder: Path, token: bytes, host: str) -> None:
        self.folder = folder
        self._server = _listening(host, _answering(folder, token))
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.1,), name="copies", daemon=True
        )
        self._thread.start()

    @property
    def port(self) -> int:
        """The port on which the server listens."""
        return self._server.server_address[1]

    def close(self) -> None:
        """Stop the server and its thread."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(socketserver.ThreadingTCPServer):
    """The server of a host's snapshots, at one address or at all IPv4 and IPv6 addresses."""

    allow_reuse_address = True
    # `server_close` does not wait for daemon threads, even if their transfers are in progress.
    daemon_threads = True

    def __init__(self, place: tuple[str, int], family: int, answering: Any) -> None:
        self.address_family = family
        super().__init__(place, answering)

    def server_bind(self) -> None:
        if self.address_family == socket.AF_INET6:
            # Without this option, a socket on all IPv6 addresses refuses IPv4 on some systems.
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        super().server_bind()


def _listening(host: str, answering: Any) -> _Server:
    """Return a server that listens only on the address that the other hosts use.

    In two cases, the server listens on all addresses of this machine instead. In the first case,
    the machine does not have the address, because a network translates it. In the second case, the
    name resolves only to loopback (127.0.1.1 in Debian's /etc/hosts).

    Args:
      host: the name or address of this machine for the other hosts.
      answering: the class that answers a connection.
    """
    named = not is_loopback(host) and host != "localhost"
    with suppress(OSError):
        for family, _, _, _, place in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
            if not (named and is_loopback(str(place[0]))):
                with suppress(OSError):
                    return _Server((str(place[0]), 0), family, answering)
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    return _Server(("", 0), family, answering)


def parts_in(folder: Path) -> list[str]:
    """Return the names of the snapshot parts in a folder."""
    if not folder.is_dir():
        return []
    return sorted(name for name in os.listdir(folder) if snapshot_of(name) is not None)


def seed(disk: Path, folder: Path) -> None:
    """Copy the snapshots on this machine's disk to the folder from which other hosts may copy.

    A part that cannot be read is left out.
    """
    for name in parts_in(disk):
        folder.mkdir(parents=True, exist_ok=True)
        with suppress(OSError):
            shutil.copyfile(disk / name, folder / f".{name}")
            (folder / f".{name}").rename(folder / name)


def list_parts(address: str, token: bytes) -> list[str]:
    """Return the names of the parts that a host has.

    Raises:
      CopyError: the host cannot be reached, does not have the token, or stops answering.
    """
    names = json.loads(b"".join(_blocks(address, LIST, token)))
    return [name for name in names if snapshot_of(name) is not None]


def fetch(
    address: str,
    name: str,
    folder: Path,
    token: bytes,
    keeping: AbstractContextManager[bool] | None = None,
) -> None:
    """Copy a part from another host into a folder, atomically.

    Args:
      keeping: the context that is entered when all bytes have arrived, and in which the part gets
        its name. The value of the context states whether the part is still wanted. None means that
        the part is always wanted.

    Raises:
      CopyError: the host cannot be reached, lacks the part or the token, or the content does not
        match its digest.
    """
    if snapshot_of(name) is None:
        raise CopyError(f"{name!r} is not a part of a snapshot")
    folder.mkdir(parents=True, exist_ok=True)
    staging = folder / f".{name}-{secrets.token_hex(4)}"
    try:
        with staging.open("wb") as file:
            file.writelines(_blocks(address, name, token))
        with keeping or nullcontext(True) as wanted:
            if wanted:
                staging.rename(folder / name)
    except OSError as error:
        raise CopyError(f"{name} of {address} cannot be stored: {error}") from error
    finally:
        staging.unlink(missing_ok=True)


def _blocks(address: str, want: str, token: bytes) -> Iterator[bytes]:
    """Request a file from another host, and yield its content in blocks.

    Raises:
      CopyError: the other host cannot be reached or does not have the token, the connection was
        lost, or the content does not match its digest.
    """
    host, _, port = address.rpartition(":")
    digest, own = hashlib.blake2b(digest_size=32), secrets.token_bytes(_NONCE)
    try:
        with (
            socket.create_connection((host.strip("[]"), int(port)), timeout=SECONDS) as connection,
            connection.makefile("rwb") as file,
        ):
            file.write(own)
            file.flush()
            _send(file, {"want": want}, token, file.read(_NONCE))
            told = _receive(file, token, own)
            left = int(told["bytes"])
            while left:
                block = file.read(min(left, _BLOCK_BYTES))
                if not block:
                    raise ValueError(f"{left} bytes are missing at the end of the file")
                digest.update(block)
                left -= len(block)
                yield block
        if digest.hexdigest() != told["blake2b"]:
            raise ValueError("the received bytes do not match their digest")
    except (OSError, ValueError) as error:
        raise CopyError(
            f"{want} of {address}: {error}. Check that the host is reachable and has the same token"
        ) from error


def _answering(folder: Path, token: bytes) -> type[socketserver.StreamRequestHandler]:
    class Answer(socketserver.StreamRequestHandler):
        timeout = SECONDS

        def handle(self) -> None:
            try:
                self._answer()
            except (OSError, ValueError):
                return  # The client left or lacks the token, and reports this itself.

        def _answer(self) -> None:
            theirs = self.rfile.read(_NONCE)
            own = secrets.token_bytes(_NONCE)
            self.wfile.write(own)
            want = _receive(self.rfile, token, own, most=_REQUEST_BYTES)["want"]
            if want == LIST:
                self._give(io.BytesIO(json.dumps(parts_in(folder)).encode()), theirs)
            elif snapshot_of(want) is not None:
                with (folder / want).open("rb") as file:
                    self._give(file, theirs)

        def _give(self, file: io.BufferedReader | io.BytesIO, theirs: bytes) -> None:
            # The file is read twice, because the signed header with its digest comes first.
            found = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=32))
            size = file.seek(0, io.SEEK_END)
            _send(self.wfile, {"bytes": size, "blake2b": found.hexdigest()}, token, theirs)
            file.seek(0)
            self.connection.sendfile(file, 0, size)

    return Answer


def _mac(token: bytes, nonce: bytes, body: bytes) -> str:
    return hmac.new(token, nonce + body, hashlib.sha256).hexdigest()


def _send(file: Any, told: JsonObject, token: bytes, nonce: bytes) -> None:
    body = json.dumps(told)
    line = json.dumps({"body": body, "mac": _mac(token, nonce, body.encode())})
    file.write(line.encode() + b"\n")
    file.flush()


def _receive(file: Any, token: bytes, nonce: bytes, most: int = _LINE_BYTES) -> JsonObject:
    """Receive a signed message of at most `most` bytes.

    Raises:
      ValueError: there is no message, or the message is not signed with the token.
    """
    line = file.readline(most)
    if not line:
        raise ValueError("the host sent no answer")
    try:
        sealed: Any = parse_json(line)
        body, mac = sealed["body"].encode(), str(sealed["mac"])
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"the answer of the host cannot be read: {line[:60]!r}") from error
    if not hmac.compare_digest(mac.encode(), _mac(token, nonce, body).encode()):
        raise ValueError("the host has a different token (give all hosts the same --token-file)")
    return json.loads(body)
