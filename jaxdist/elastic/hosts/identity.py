"""Compatibility of hosts: the properties that must be equal on all hosts of a run."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jaxdist
from jaxdist.config.document import flat
from jaxdist.errors import ConfigError, some_of
from jaxdist.runtime import environment
from jaxdist.types import Json

PACKAGES = ("jaxdist", "jax", "jaxlib", "flax", "optax")
LISTED = 8


def compatibility(
    values: Json, settings: Mapping[str, Json], host: str, name: str, token: bytes
) -> Any:
    """Return the description by which another host checks that the two hosts are compatible.

    Args:
      values: the values of the config, with its overrides.
      settings: the settings of the agent that are not in the config.
      host: the name of this host for messages.
      name: the name of the rendezvous.
      token: the shared token; the result contains only a proof of the token.
    """
    versions = {f"version of {key}": found for key, found in environment.versions(PACKAGES).items()}
    return {
        "host": host,
        "rendezvous": digest_of(name),
        "proof": hmac.new(token, name.encode(), hashlib.sha256).hexdigest(),
        "alike": {
            **versions,
            "code of jaxdist": code_digest(),
            **{f"config {key}": value for key, value in flat(values).items()},
            **settings,
        },
    }


def digest_of(name: str) -> str:
    """Return a digest of the name of the rendezvous, since the name can be a secret."""
    return hashlib.sha256(b"rendezvous " + name.encode()).hexdigest()[:16]


def check_compatibility(own: Mapping[str, Any], leader: Mapping[str, Any], address: str) -> None:
    """Check that this host is compatible with the leader.

    Args:
      own: the description of this host, as `compatibility` returns it.
      leader: the description of the leader.
      address: the address of the rendezvous, for the message.

    Raises:
      ConfigError: the two hosts differ; the message names both hosts, and the differences.
    """
    if own["rendezvous"] != leader.get("rendezvous"):
        raise ConfigError(
            f"this host, {own['host']}, or {leader['host']} joined before the rendezvous {address} "
            "was deleted and recreated: stop all agents, and start them again with --resume"
        )
    if own["proof"] != leader["proof"]:
        raise ConfigError(
            f"the token of this host, {own['host']}, differs from the token of {leader['host']} at "
            f"{address}: give all hosts the same --token-file"
        )
    here, there = own["alike"], leader["alike"]
    keys = [key for key in {**there, **here} if here.get(key) != there.get(key)]
    if keys:
        told = [f"{key}: {here.get(key)} here, {there.get(key)} there" for key in keys]
        raise ConfigError(
            f"this host, {own['host']}, differs from {leader['host']} at {address}: "
            f"{some_of(told, LISTED, '; ')}. Make the two hosts equal, or choose another "
            "--rendezvous"
        )


def code_digest() -> str:
    """Return a digest of jaxdist's sources, since two checkouts may have the same version.

    The sources are the modules, and the tables that modules read.
    """
    root = Path(jaxdist.__file__).parent
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted(
        path for path in root.rglob("*") if path.suffix in (".py", ".toml", ".json")
    ):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()
