from __future__ import annotations

import logging
import stat
from collections.abc import Iterator

import jax
import pytest

from jaxdist.runtime.compilation_cache import SETTINGS, enable


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    names = [*SETTINGS, "jax_compilation_cache_dir"]
    before = {name: getattr(jax.config, name) for name in names}
    # A run in this process, by another test, may have set it already.
    jax.config.update("jax_compilation_cache_dir", None)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


def test_the_directory_is_made_private_and_given_to_jax(tmp_path):
    wanted = tmp_path / "cache" / "compiled"
    assert enable(wanted) == wanted
    assert stat.S_IMODE(wanted.stat().st_mode) == 0o700
    assert jax.config.jax_compilation_cache_dir == str(wanted)
    assert jax.config.jax_persistent_cache_min_compile_time_secs == 0
    assert enable(tmp_path / "other") == wanted  # what is set stays


def test_a_cache_that_the_user_chose_stays(tmp_path):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "theirs"))
    assert enable(tmp_path / "ours") == tmp_path / "theirs"
    assert not (tmp_path / "ours").exists()


def test_a_user_can_switch_it_off(tmp_path):
    jax.config.update("jax_enable_compilation_cache", False)
    assert enable(tmp_path / "ours") is None
    assert jax.config.jax_compilation_cache_dir is None


def _refused(directory, caplog) -> str:
    with caplog.at_level(logging.WARNING):
        assert enable(directory) is None
    assert jax.config.jax_compilation_cache_dir is None
    (record,) = caplog.records
    return record.getMessage()


def test_a_directory_that_others_can_write_is_not_trusted(tmp_path, caplog):
    tmp_path.chmod(0o777)
    message = _refused(tmp_path, caplog)
    assert f"{tmp_path} can be written by other users (mode 777): run chmod 700" in message


def test_a_link_is_not_followed(tmp_path, caplog):
    (tmp_path / "link").symlink_to(tmp_path)
    assert "link is not a directory" in _refused(tmp_path / "link", caplog)


def test_a_directory_of_somebody_else_is_not_trusted(tmp_path, caplog, monkeypatch):
    owner = tmp_path.stat().st_uid
    monkeypatch.setattr("os.getuid", lambda: owner + 1)
    assert f"belongs to user {owner}, not to {owner + 1}" in _refused(tmp_path, caplog)


def test_a_directory_that_cannot_be_made_is_said(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    assert "cannot be made: File exists" in _refused(tmp_path / "file" / "cache", caplog)
