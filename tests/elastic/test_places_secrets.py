"""What hosts share without a token file, and which Redis servers are refused."""

from __future__ import annotations

import os
import stat

import pytest

from jaxdist.elastic.hosts.rendezvous.contract import RendezvousError, Token
from jaxdist.elastic.hosts.rendezvous.folder import FolderRendezvous
from jaxdist.elastic.hosts.rendezvous.redis_server import check_secure, find_password
from jaxdist.errors import ConfigError


def test_the_secret_of_a_folder_is_for_its_owner_alone(tmp_path):
    place = FolderRendezvous(tmp_path / "place")
    assert stat.S_IMODE(os.stat(tmp_path / "place").st_mode) == 0o700
    secret = place.secret()
    assert len(secret) == 64
    assert FolderRendezvous(tmp_path / "place").secret() == secret
    assert stat.S_IMODE(os.stat(tmp_path / "place/secret").st_mode) == 0o600
    # What anybody who may list a folder sees is no part of it.
    assert Token.parse(place.token()).name.encode() not in secret


def test_a_secret_that_others_may_read_is_refused(tmp_path):
    place = FolderRendezvous(tmp_path)
    place.secret()
    (tmp_path / "secret").chmod(0o644)
    with pytest.raises(RendezvousError, match=r"secret can be read by other users \(mode 644\)"):
        place.secret()


def test_a_secret_that_was_cut_off_is_refused(tmp_path):
    place = FolderRendezvous(tmp_path)
    place.secret()
    (tmp_path / "secret").write_text("abc")
    with pytest.raises(RendezvousError, match="has 3 bytes instead of 64"):
        place.secret()


@pytest.mark.parametrize(
    ("url", "password", "lacking"),
    [
        ("redis://node1:6379/0", None, r"TLS \(rediss://\) and a password"),
        ("redis://:secret@10.0.0.7", None, "lacks TLS"),
        ("rediss://node1", None, "lacks a password"),
        ("redis://node1", "secret", "lacks TLS"),
        ("redis://[fd00::1]:6379", "secret", "lacks TLS"),
    ],
)
def test_a_redis_server_that_strangers_could_use_is_refused(url, password, lacking):
    with pytest.raises(ConfigError, match=lacking) as caught:
        check_secure(url, password)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "password"),
    [
        ("redis://localhost:6379", None),
        ("redis://127.0.0.1", None),
        ("redis://[::1]:6379", None),
        ("rediss://node1", "secret"),
        ("rediss://:secret@node1", None),
    ],
)
def test_a_redis_server_that_is_safe_is_not(url, password):
    check_secure(url, password)


def test_the_password_comes_from_a_file_or_the_environment(tmp_path):
    assert find_password({}) is None
    assert find_password({"JAXDIST_REDIS_PASSWORD": "a"}) == "a"
    (tmp_path / "password").write_text("b\n")
    environ = {"JAXDIST_REDIS_PASSWORD_FILE": str(tmp_path / "password")}
    assert find_password(environ) == "b"
    with pytest.raises(ConfigError, match="JAXDIST_REDIS_PASSWORD_FILE /no/where cannot be read"):
        find_password({"JAXDIST_REDIS_PASSWORD_FILE": "/no/where"})
