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
import json
import os
import secrets
import shutil
import socket
import socketserver
import threading
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from pathlib import Path
from typing import Any, BinaryIO

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


def address_of(host: str, port: int) -> str:
    """Return `HOST:PORT`, with brackets around an IPv6 address.

    >>> address_of("node1", 7000), address_of("fd00::1", 7000)
    ('node1:7000', '[fd00::1]:7000')
    """
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


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
    with _Asked(address, LIST, token) as asked:
        names = json.loads(asked.read().decode())
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
        with _Asked(address, name, token) as asked, staging.open("wb") as file:
            asked.copy(file)
        with keeping or nullcontext(True) as wanted:
            if wanted:
                staging.rename(folder / name)
    except OSError as error:
        raise CopyError(f"{name} of {address} cannot be stored: {error}") from error
    finally:
        staging.unlink(missing_ok=True)


class _Asked:
    """A context manager for a file that was requested from another host.

    The constructor sends the request and receives the header of the file.

    Raises:
      CopyError: the other host cannot be reached, or does not have the token.
    """

    def __init__(self, address: str, want: str, token: bytes) -> None:
        self._who, self._want = f"{want} of {address}", want
        host, _, port = address.rpartition(":")
        try:
            with ExitStack() as stack:
                place = host.strip("[]"), int(port)
                self._socket = socket.create_connection(place, timeout=SECONDS)
                stack.enter_context(self._socket)
                self._file = stack.enter_context(self._socket.makefile("rwb"))
                own = secrets.token_bytes(_NONCE)
                self._file.write(own)
                self._file.flush()
                theirs = self._file.read(_NONCE)
                _send(self._file, {"want": want}, token, theirs)
                self._told = _receive(self._file, token, own)
                self._stack = stack.pop_all()
        except (OSError, ValueError) as error:
            raise CopyError(
                f"{self._who}: {error}. Check that the host is reachable and has the same token"
            ) from error

    def __enter__(self) -> _Asked:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def read(self) -> bytes:
        """Read the content of the requested file, which must be short.

        Raises:
          CopyError: the connection was lost, or the content does not match its digest.
        """
        raw = self._read(min(int(self._told["bytes"]), _LINE_BYTES))
        self._check(hashlib.blake2b(raw, digest_size=32).hexdigest())
        return raw

    def copy(self, file: BinaryIO) -> None:
        """Copy the content of the requested file into an open file.

        Raises:
          CopyError: the connection was lost, or the content does not match its digest.
        """
        digest, left = hashlib.blake2b(digest_size=32), int(self._told["bytes"])
        while left:
            block = self._read(min(left, _BLOCK_BYTES))
            if not block:
                raise CopyError(f"{self._who}: {left} bytes are missing at the end of the file")
            digest.update(block)
            file.write(block)
            left -= len(block)
        self._check(digest.hexdigest())

    def _read(self, size: int) -> bytes:
        try:
            return self._file.read(size)
        except OSError as error:
            raise CopyError(f"{self._who}: {error}") from error

    def _check(self, found: str) -> None:
        if found != self._told["blake2b"]:
            raise CopyError(f"{self._who}: the received bytes do not match their digest")


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
            both = _Both(self.rfile, self.wfile)
            want = _receive(both, token, own, most=_REQUEST_BYTES)["want"]
            if want == LIST:
                raw = json.dumps(parts_in(folder)).encode()
                digest = hashlib.blake2b(raw, digest_size=32).hexdigest()
                _send(both, {"bytes": len(raw), "blake2b": digest}, token, theirs)
                self.wfile.write(raw)
            elif snapshot_of(want) is not None:
                self._give(both, folder / want, theirs)

        def _give(self, both: _Both, path: Path, theirs: bytes) -> None:
            with path.open("rb") as file:
                # The file is read twice, because the signed header with its digest comes first.
                found = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=32))
                size = file.tell()
                told = {"bytes": size, "blake2b": found.hexdigest()}
                _send(both, told, token, theirs)
                file.seek(0)
                self.connection.sendfile(file, 0, size)

    return Answer


class _Both:
    """The reader and the writer of a connection as a single file."""

    def __init__(self, reader: Any, writer: Any) -> None:
        self.readline, self.write = reader.readline, writer.write

    def flush(self) -> None:
        """Do nothing, since writes are not buffered."""


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
