from __future__ import annotations

import threading
from pathlib import Path

import pytest

from jaxdist.config.files import replace_bytes
from jaxdist.data.cache import cache_directory, publish_folder


def test_where_the_cache_is() -> None:
    assert cache_directory({"JAXDIST_CACHE": "/a", "XDG_CACHE_HOME": "/b"}) == Path("/a")
    assert cache_directory({"XDG_CACHE_HOME": "/b"}) == Path("/b/jaxdist")
    assert cache_directory({}) == Path.home() / ".cache" / "jaxdist"


def test_a_folder_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "target"

    def half(folder: Path) -> None:
        (folder / "one").write_text("1")
        raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        publish_folder(target, half)
    assert list(target.parent.iterdir()) == []
    publish_folder(target, lambda folder: (folder / "one").touch())
    assert [path.name for path in target.parent.iterdir()] == ["target"]


def test_of_several_writers_one_wins(tmp_path: Path) -> None:
    target = tmp_path / "target"
    ready = threading.Barrier(4)

    def write(folder: Path) -> None:
        (folder / "one").write_text("same")
        ready.wait(20)

    threads = [threading.Thread(target=publish_folder, args=(target, write)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert (target / "one").read_text() == "same"
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


def test_a_file_is_replaced_at_once(tmp_path: Path) -> None:
    target = tmp_path / "number"
    replace_bytes(target, b"1")
    replace_bytes(target, b"2")
    assert target.read_bytes() == b"2"
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="folder"):
        replace_bytes(tmp_path / "folder", b"3")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "number"]
