from __future__ import annotations

import re
from pathlib import Path

import pytest

from jaxdist.config import read
from jaxdist.errors import ConfigError


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("base.yaml").write_text("mesh: {data: 4, tensor: 2}\nmodel: {layers: 2}\n")
    Path("x.yaml").write_text(
        "include: base.yaml\ndata:\n  files: [a, {name: b}]\nevaluate: null\n"
    )
    return "x.yaml"


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("model.layers=12", ("model", "layers"), 12),
        ("model.lr=1e-3", ("model", "lr"), 0.001),
        ("model=null", ("model",), None),
        ("model.layers=", ("model", "layers"), None),
        ("mesh={stage: 2, data: 1}", ("mesh",), {"stage": 2, "data": 1}),
        ("data.files.0=x", ("data", "files", 0), "x"),
        ("data.files.1.name=[1, on]", ("data", "files", 1, "name"), [1, "on"]),
        ("new.deep.key=a=b", ("new", "deep", "key"), "a=b"),
        ("evaluate.every=5", ("evaluate", "every"), 5),
        ("model . layers = 3", ("model", "layers"), 3),
        ("name='1'", ("name",), "1"),
    ],
)
def test_an_override_sets_one_value(file: str, override: str, path: tuple, value: object):
    document = read(file, [override])
    assert document.get(path) == (path, value)
    assert str(document.origin(path)) == f"override {override!r}"


def test_other_values_keep_their_origin(file: str):
    document = read(file, ["data.files.0=x"])
    assert str(document.origin(("data", "files", 1, "name"))) == "x.yaml:3"
    assert str(document.origin(("data", "files"))) == "x.yaml:3"
    assert str(document.origin(("model", "layers"))) == "base.yaml:2"


def test_an_override_replaces_a_mapping(file: str):
    document = read(file, ["mesh={stage: 2}"])
    assert document.values["mesh"] == {"stage": 2}
    assert ("mesh", "data") not in document.origins


def test_the_last_override_wins(file: str):
    document = read(file, ["model.layers=3", "model={layers: 4}", "model.layers=5"])
    assert document.values["model"] == {"layers": 5}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "model.layers",
            "override 'model.layers': the setting has no '='; write section.key=value",
        ),
        ("=3", "override '=3': the key is empty"),
        ("model..layers=3", "override 'model..layers=3': the key is empty"),
        ("model.layers.x=3", "model.layers is 2 (at base.yaml:2), not a section, so it has no 'x'"),
        ("data.files.2=3", "data.files (at x.yaml:3) is a list of 2, and '2' is not an index"),
        ("data.files.-1=3", "data.files (at x.yaml:3) is a list of 2, and '-1' is not an index"),
        (
            "data.files.name=3",
            "data.files (at x.yaml:3) is a list of 2, and 'name' is not an index",
        ),
        ("include=y.yaml", "'include' can be set only in a config file"),
        ("replace=mesh", "'replace' can be set only in a config file"),
        (
            "files=*.txt",
            "override 'files=*.txt': '*.txt' refers to an anchor '&.txt' that is not complete",
        ),
        ("a=[1, 2", "override 'a=[1, 2': not valid YAML: expected ',' or ']'"),
        ("a=!!int 3", "override 'a=!!int 3': the tag 'tag:yaml.org,2002:int' is not supported"),
        ("a.b=" + "x" * 90 + ": y: z", "xxx…: not valid YAML: mapping values are not allowed here"),
        (".".join("a" * 40) + "=1", "the path has 40 keys; at most 32"),
        ("a=\udcff", "override 'a=\\udcff': not valid YAML: special characters are not allowed"),
        ("\udcff=1", "override '\\udcff=1': the key is not printable text"),
    ],
)
def test_a_bad_override_is_refused(file: str, override: str, message: str):
    with pytest.raises(ConfigError, match=re.escape(message)):
        read(file, [override])
