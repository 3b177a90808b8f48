"""The construction of a rendezvous from its address."""

from __future__ import annotations

from pathlib import Path

from jaxdist.elastic.hosts.rendezvous.contract import Rendezvous
from jaxdist.errors import ConfigError

SCHEMES = ("redis://", "rediss://")
ETCD = ("etcd://", "etcds://")


def open_rendezvous(address: str) -> Rendezvous:
    """Open the rendezvous at an address: a directory, redis://HOST:PORT or etcd://HOST:PORT.

    Raises:
      ConfigError: the address has an unknown form, or a package for it is missing.
      RendezvousError: the rendezvous cannot be reached, or is unsuitable.
    """
    if address.startswith(SCHEMES):
        from jaxdist.elastic.hosts.rendezvous.redis_server import RedisRendezvous

        return RedisRendezvous(address)
    if address.startswith(ETCD):
        from jaxdist.elastic.hosts.rendezvous.etcd_server import EtcdRendezvous

        return EtcdRendezvous(address)
    if "://" in address:
        raise ConfigError(
            f"--rendezvous {address}: use a directory that all hosts share, redis://HOST:PORT, or "
            "etcd://HOST:PORT"
        )
    from jaxdist.elastic.hosts.rendezvous.folder import FolderRendezvous

    return FolderRendezvous(Path(address))
