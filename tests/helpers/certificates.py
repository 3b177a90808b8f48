"""Certificates that a test creates."""

from __future__ import annotations

import subprocess
from pathlib import Path

from jaxdist.wire.config import TlsConfig


def openssl(folder: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)


def certified(folder: Path, name: str = "IP:127.0.0.1,DNS:localhost") -> TlsConfig:
    """Create an authority in `folder`, and a certificate for `name` that the authority signs."""
    folder.mkdir()
    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    own = ("-subj", "/CN=localhost", "-addext", f"subjectAltName={name}")
    openssl(folder, "req", "-x509", *curve, "-subj", "/CN=authority", "-days", "1",
            "-keyout", "ca.key", "-out", "ca.pem")  # fmt: skip
    openssl(folder, "req", *curve, *own, "-keyout", "own.key", "-out", "own.csr")
    openssl(folder, "x509", "-req", "-in", "own.csr", "-CA", "ca.pem", "-CAkey", "ca.key",
            "-days", "1", "-copy_extensions", "copy", "-out", "own.pem")  # fmt: skip
    (folder / "own.key").chmod(0o600)
    paths = (folder / name for name in ("ca.pem", "own.pem", "own.key"))
    return TlsConfig(**dict(zip(("authority", "certificate", "key"), paths, strict=True)))
