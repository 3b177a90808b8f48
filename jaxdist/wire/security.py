"""The authentication of sessions: a shared token and TLS certificates."""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import ssl
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc

from jaxdist.errors import RunError, os_errors_as
from jaxdist.wire.config import TlsConfig

TOKEN_KEY = "jaxdist-token"
TOKEN_LEAST = 32
"""The smallest number of characters of a token; `make_token` writes 64, of 256 random bits."""


@dataclass(frozen=True)
class Tls:
    """The TLS certificates and key, read from their files.

    Attributes:
      authority, certificate, key: the contents of the PEM files.
    """

    authority: bytes
    certificate: bytes
    key: bytes

    def server(self) -> grpc.ServerCredentials:
        """Return the TLS credentials of a server that refuses clients without a certificate."""
        return grpc.ssl_server_credentials(
            [(self.key, self.certificate)], self.authority, require_client_auth=True
        )

    def channel(self) -> grpc.ChannelCredentials:
        """Return the TLS credentials with which a worker connects to servers."""
        return grpc.ssl_channel_credentials(self.authority, self.key, self.certificate)


def read_tls(config: TlsConfig | None) -> Tls | None:
    """Read the certificates and the key that a config names, or return None without a config.

    Raises:
      RunError: a file cannot be read, or others may read the key.
    """
    if config is None:
        return None
    try:
        key = _private(config.key)
        found = Tls(config.authority.read_bytes(), config.certificate.read_bytes(), key)
    except OSError as error:
        raise RunError(
            f"certificates: {error.filename} cannot be read: {error.strerror}"
        ) from error
    try:
        _context(found)
    except ssl.SSLError as error:
        # gRPC accepts any files, and later fails as if the port were in use.
        raise RunError(
            f"certificates: {config.authority}, {config.certificate} and {config.key} cannot be "
            f"used together: {error.reason or error}; the key must belong to the certificate, and "
            "all three files must be in PEM format"
        ) from error
    return found


def _context(tls: Tls) -> ssl.SSLContext:
    """Make the context in which a client with these certificates performs a handshake.

    Raises:
      ssl.SSLError: the files are not certificates, or the key does not belong to the certificate.
    """
    context = ssl.create_default_context(cadata=tls.authority.decode("ascii", "replace"))
    context.set_alpn_protocols(["h2"])
    if tls.certificate is not None and tls.key is not None:
        with tempfile.TemporaryDirectory(prefix="jaxdist-") as folder:
            # `load_cert_chain` reads only files; this folder has mode 700.
            chain = Path(folder) / "chain.pem"
            chain.write_bytes(tls.certificate + b"\n" + tls.key)
            context.load_cert_chain(chain)
    return context


def certificate_refusal(address: str, tls: Tls, seconds: float) -> str | None:
    """Return why server or client rejects the other's certificate, or None if both are accepted.

    gRPC retries a failed handshake without end and hides the reason, so this function does a
    handshake itself. The result is None if server and client accept, or if the server cannot be
    reached.

    Args:
      address: `host:port`.
      seconds: the time limit for the server's answer, in seconds.
    """
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    done = False
    try:
        with (
            socket.create_connection((host, int(port)), timeout=seconds) as plain,
            _context(tls).wrap_socket(plain, server_hostname=host) as secured,
        ):
            done = True
            # In TLS 1.3 the server checks the client's certificate after the client's handshake
            # ends. A gRPC server that accepts the certificate then sends first; a server that does
            # not accept it closes the connection.
            if secured.recv(1):
                return None
    except ssl.SSLError as error:
        return getattr(error, "verify_message", "") or error.reason or str(error)
    except OSError as error:
        if not done or isinstance(error, TimeoutError):
            return None
    return "the server does not accept the certificate of this process"


def write_private(path: Path, text: str) -> None:
    """Write a new file that only its owner may read."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)


def make_token(path: Path) -> None:
    """Write a new token to a file that only its owner may read."""
    write_private(path, secrets.token_hex(32) + "\n")


@contextmanager
def token_file(given: Path | None) -> Iterator[Path]:
    """Yield the path of a token file: the given file, or a new file in a private folder.

    A new file is deleted when the context ends.
    """
    if given is not None:
        yield given.absolute()
        return
    with tempfile.TemporaryDirectory(prefix="jaxdist-") as folder:
        path = Path(folder) / "token"
        make_token(path)
        yield path


def read_token(path: Path) -> str:
    """Return the token with which workers authenticate, read from a file.

    Raises:
      RunError: the file cannot be read, others may read it, or the token is too short.
    """
    with os_errors_as(
        RunError,
        f"token file {path} cannot be read",
        "set strategy.processes.token to a file that this user may read",
    ):
        token = _private(path).decode(errors="replace").strip()
    if len(token) < TOKEN_LEAST or not token.isascii() or not token.isprintable():
        raise RunError(
            f"token file {path} has {len(token)} characters, but a token needs at least "
            f"{TOKEN_LEAST} printable characters: write such a token, for example with "
            "`openssl rand -hex 32`"
        )
    return token


def same_token(given: object, token: str) -> bool:
    """Return whether a peer's token is correct, in constant time for tokens of equal length."""
    return isinstance(given, str) and hmac.compare_digest(given.encode(), token.encode())


def _private(path: Path) -> bytes:
    """Return the content of a file, or refuse a file that other users can read."""
    with path.open("rb") as file:
        mode = os.fstat(file.fileno()).st_mode
        if stat.S_IMODE(mode) & 0o077:
            raise RunError(
                f"{path} can be read by other users (mode {stat.S_IMODE(mode):o}): run chmod 600 "
                f"{path}"
            )
        return file.read()
