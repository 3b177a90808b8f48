from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxdist.config.importing import call_object, describe_exception, load_object
from jaxdist.errors import ConfigError


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A current directory with modules of the user's own, forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    (tmp_path / "userpkg").mkdir()
    (tmp_path / "userpkg" / "__init__.py").write_text("")
    (tmp_path / "userpkg" / "model.py").write_text(
        "class Space:\n    value = 7\n\ndef build(width=1):\n    return width\n\n"
        "def fails():\n    raise KeyError('lost')\n"
    )
    (tmp_path / "userpkg" / "broken.py").write_text("x = 1\ny = x / 0\n")
    (tmp_path / "userpkg" / "syntax.py").write_text("x = 1\ndef (:\n")
    (tmp_path / "userpkg" / "needs.py").write_text("import absent_module_xyz\n")
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_the_current_directory_is_searched(package: Path) -> None:
    assert load_object("userpkg.model:build")(width=3) == 3
    assert load_object("userpkg.model:Space.value") == 7


def test_a_suggestion_is_of_the_directory_that_is_current_now(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (package / "elsewhere").mkdir()
    monkeypatch.chdir(package / "elsewhere")
    with pytest.raises(ConfigError):
        load_object("userpk.model:build")
    monkeypatch.chdir(package)
    with pytest.raises(ConfigError, match=r"did you mean userpkg\?"):
        load_object("userpk.model:build")


def test_the_current_directory_comes_first(package: Path) -> None:
    (package / "colorsys.py").write_text("mine = True\n")
    sys.modules.pop("colorsys", None)
    assert load_object("colorsys:mine") is True


@pytest.mark.parametrize("path", ["", "a.b", "a:", ":b", "a b:c", "a:b:c", "a..b:c", "../x:y"])
def test_malformed_path(path: str) -> None:
    with pytest.raises(ConfigError, match=r"expected 'package\.module:name'") as caught:
        load_object(path)
    assert repr(path) in str(caught.value)


@pytest.mark.parametrize(
    ("path", "parts"),
    [
        ("userpk.model:build", ["no module 'userpk'", "did you mean userpkg?"]),
        ("userpkg.modle:build", ["no module 'userpkg.modle'", "did you mean userpkg.model?"]),
        ("userpkg.model:biuld", ["no attribute 'biuld'", "did you mean 'build'?"]),
        ("userpkg.model:Space.valu", ["'Space' has no attribute 'valu'", "'value'"]),
        ("userpkg.broken:x", ["ZeroDivisionError", "broken.py:2"]),
        ("userpkg.syntax:x", ["SyntaxError", "syntax.py:2"]),
        ("userpkg.needs:x", ["absent_module_xyz", "needs.py:1"]),
    ],
)
def test_what_cannot_be_imported_says_why(package: Path, path: str, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_object(path)
    for part in (path, *parts):
        assert part in str(caught.value)


def test_calls_are_shielded(package: Path) -> None:
    build = load_object("userpkg.model:build")
    assert call_object("userpkg.model:build", build, {"width": 5}) == 5
    with pytest.raises(ConfigError, match="unexpected keyword argument 'depth'"):
        call_object("userpkg.model:build", build, {"depth": 5})
    with pytest.raises(ConfigError, match=r"KeyError: 'lost' \(.*model\.py:8\)"):
        call_object("userpkg.model:fails", load_object("userpkg.model:fails"), {})
    with pytest.raises(ConfigError, match="int object is not callable"):
        call_object("userpkg.model:Space.value", 7, {})


def test_an_exception_without_traceback_is_described() -> None:
    assert describe_exception(ValueError("a")) == "ValueError: a"
