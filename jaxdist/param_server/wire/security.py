"""Who may talk to a server: a shared token, certificates, and the addresses that it listens on."""

from __future__ import annotations

import hmac
import os
import secrets
import stat
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
        return Tls(config.authority.read_bytes(), config.certificate.read_bytes(), key)
    except OSError as error:
        raise RunError(
            f"certificates: {error.filename} cannot be read: {error.strerror}"
        ) from error


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
