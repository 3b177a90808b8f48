"""Certificates: both sides show theirs, and nobody comes in without."""

from __future__ import annotations

import shutil
from dataclasses import replace

import numpy as np
import pytest
from certificates import certified
from live_servers import Servers

from jaxdist.errors import RunError
from jaxdist.param_server.consistency.arrival import Asynchronous
from jaxdist.param_server.live.client import Client
from jaxdist.param_server.live.linked import Timeouts
from jaxdist.wire.security import Tls, certificate_refusal, read_tls

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
WHOLE = Asynchronous(gradient_weight="whole")


@pytest.fixture(scope="module")
def ours(tmp_path_factory) -> Tls:
    return read_tls(certified(tmp_path_factory.mktemp("tls") / "ours"))


def test_a_push_with_certificates(ours):
    with Servers(WHOLE, 1, rpc=True, tls=ours) as servers:
        with servers.client(0) as client:
            client.push([np.ones_like(one) for one in client.read()])
            client.drain()
        assert all((one.shard.params == -1).all() for one in servers.servers)


@pytest.mark.parametrize(
    "how",
    [
        "in the clear",
        "of another authority",
        pytest.param("without one of its own", marks=pytest.mark.full),
    ],
)
@pytest.mark.every(2)
def test_nobody_comes_in_without_the_right_certificate(ours, how, tmp_path):
    other = read_tls(certified(tmp_path / "other")) if "another" in how else ours
    message = "server 0 cannot be reached"
    if tls_fails := how != "in the clear":
        message = "server 0 refuses to admit the client: the certificates .* do not match"
    tls = {
        "in the clear": None,
        "of another authority": other,
        "without one of its own": replace(ours, key=None, certificate=None),
    }[how]
    with Servers(WHOLE, 1, count=1, rpc=True, tls=ours) as servers:
        wire = replace(servers.wires[0], tls=tls)
        given = (0, servers.model, servers.layouts, [wire])
        # Who is refused for good is told so long before patience ends.
        patience = Timeouts(deadline_seconds=20 if tls_fails else 0.5)
        with (
            Client(*given, patience=patience) as client,
            pytest.raises(RunError, match=message),
        ):
            client.read()
        assert not servers.servers[0].state.inboxes[0].expected
        assert servers.servers[0]._clients == {}


def test_files_that_cannot_be_used(tmp_path):
    config = certified(tmp_path / "ours")
    config.key.chmod(0o640)
    with pytest.raises(RunError, match=r"own.key can be read by other users \(mode 640\)"):
        read_tls(config)
    config.key.unlink()
    with pytest.raises(RunError, match=r"certificates: .*own.key cannot be read: No such file"):
        read_tls(config)


def test_a_key_of_another_certificate_is_told_when_it_is_read(tmp_path):
    """And not, as gRPC has it, when the server's port cannot be opened."""
    ours, other = certified(tmp_path / "ours"), certified(tmp_path / "other")
    mixed = ours.model_copy(update={"key": other.key})
    with pytest.raises(RunError, match=r"own.key cannot be used together: KEY_VALUES_MISMATCH"):
        read_tls(mixed)
    ours.authority.write_text("none")
    with pytest.raises(RunError, match=r"ca.pem, .* cannot be used together"):
        read_tls(ours)


def test_a_certificate_for_another_name_is_told(tmp_path):
    tls = read_tls(certified(tmp_path / "ours", "DNS:elsewhere"))
    with Servers(WHOLE, 1, count=1, rpc=True, tls=tls) as servers:
        assert "127.0.0.1" in (certificate_refusal(servers.wires[0].address, tls, 5.0) or "")
    assert (
        certificate_refusal(servers.wires[0].address, tls, 5.0) is None
    )  # nobody is there any more
