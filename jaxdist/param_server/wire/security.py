"""Who may talk to a server: a shared token, certificates, and the addresses that it listens on."""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import ssl
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path

import grpc

from jaxdist.errors import RunError
from jaxdist.param_server.wire.config import TlsConfig

TOKEN_KEY = "jaxdist-token"
TOKEN_LEAST = 32
"""Characters of a token; `make_token` writes 64, of 256 random bits."""


@dataclass(frozen=True)
class Tls:
    """The same, read.

    Attributes:
      authority, certificate, key: as PEM.
    """

    authority: bytes
    certificate: bytes
    key: bytes

    def server(self) -> grpc.ServerCredentials:
        """For a server, which takes nobody without a certificate."""
        return grpc.ssl_server_credentials(
            [(self.key, self.certificate)], self.authority, require_client_auth=True
        )

    def channel(self) -> grpc.ChannelCredentials:
        """For a worker."""
        return grpc.ssl_channel_credentials(self.authority, self.key, self.certificate)


def read_tls(config: TlsConfig) -> Tls:
    """The certificates of a config.

    Raises:
      RunError: one cannot be read, or others may read the key.
    """
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
        # gRPC takes any files, and fails later as if the port were taken.
        raise RunError(
            f"certificates: {config.authority}, {config.certificate} and {config.key} cannot be "
            f"used together: {error.reason or error}; the key must be that of the certificate, "
            "all three as PEM"
        ) from error
    return found


def _context(tls: Tls) -> ssl.SSLContext:
    """Make the context in which a client of these certificates does a handshake.

    Raises:
      ssl.SSLError: they are no certificates, or the key is not that of the certificate.
    """
    context = ssl.create_default_context(cadata=tls.authority.decode("ascii", "replace"))
    context.set_alpn_protocols(["h2"])
    if tls.certificate is not None and tls.key is not None:
        with tempfile.TemporaryDirectory(prefix="jaxdist-") as folder:  # of mode 700
            chain = Path(folder) / "chain.pem"
            chain.write_bytes(tls.certificate + b"\n" + tls.key)
            context.load_cert_chain(chain)
    return context


def refusal(address: str, tls: Tls, seconds: float) -> str | None:
    """Return why a server does not accept these certificates, or they not its own.

    gRPC tries a failed handshake again for ever and tells nobody its reason, so one is done here.
    None: the server is not there, or accepts them.

    Args:
      address: `host:port`.
      seconds: how long an answer may take.
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
            # In TLS 1.3 the server looks at the client's certificate after the client is done. A
            # server of gRPC that accepts it speaks first; any other closes the connection.
            if secured.recv(1):
                return None
    except ssl.SSLError as error:
        return getattr(error, "verify_message", "") or error.reason or str(error)
    except OSError as error:
        if not done or isinstance(error, TimeoutError):
            return None
    return "the server does not accept the certificate of this process"


def make_token(path: Path) -> None:
    """Write a new token, which nobody else can read."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(secrets.token_hex(32) + "\n")


def read_token(path: Path) -> str:
    """The token of a file.

    Raises:
      RunError: it cannot be read, others may read it, or it is too short to be one.
    """
    try:
        token = _private(path).decode(errors="replace").strip()
    except OSError as error:
        raise RunError(f"token file {path} cannot be read: {error.strerror}") from error
    if len(token) < TOKEN_LEAST or not token.isascii() or not token.isprintable():
        raise RunError(
            f"token file {path} holds {len(token)} characters: a token has at least {TOKEN_LEAST} "
            "printable ones"
        )
    return token


def same_token(given: object, token: str) -> bool:
    """Whether a peer knows the token; takes equally long for any wrong one of its length."""
    return isinstance(given, str) and hmac.compare_digest(given.encode(), token.encode())


def _private(path: Path) -> bytes:
    """The content of a file that its owner alone can read."""
    with path.open("rb") as file:
        mode = os.fstat(file.fileno()).st_mode
        if stat.S_IMODE(mode) & 0o077:
            raise RunError(
                f"{path} may be read by others (mode {stat.S_IMODE(mode):o}): chmod 600 {path}"
            )
        return file.read()
