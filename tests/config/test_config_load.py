from __future__ import annotations

import os
import re
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest

from jaxdist.config import parse, read
from jaxdist.config.load import MAX_FILES
from jaxdist.config.parse import MAX_BYTES, MAX_DEPTH, MAX_VALUES
from jaxdist.errors import ConfigError
from jaxdist.experiment import load


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(name: str, text: str | bytes) -> str:
    file = Path(name)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(text.encode() if isinstance(text, str) else text)
    return name


def refused(message: str, name: str = "x.yaml") -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        read(name)


def test_importing_config_imports_no_jax():
    code = "import sys, jaxdist.config; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_yaml_is_version_1_2(folder: Path):
    write("x.yaml", "a: 1e-3\nb: on\nc: 0x10\nd: 1_000\ne: 2024-01-31\nf: ~\ng: true\nh: '1'\ni: =")
    assert read("x.yaml").values == {
        "a": 0.001,
        "b": "on",
        "c": 16,
        "d": 1000,
        "e": "2024-01-31",
        "f": None,
        "g": True,
        "h": "1",
        "i": "=",
    }


def test_a_number_pattern_that_is_no_number_stays_text(folder: Path):
    assert read(write("x.yaml", "a: -_")).values == {"a": "-_"}


@pytest.mark.parametrize("text", ["", "# only a comment\n", "---\n", "null"])
def test_an_empty_file_is_an_empty_mapping(folder: Path, text: str):
    assert read(write("x.yaml", text)).values == {}


@pytest.mark.parametrize("text", [b"\xef\xbb\xbfa:\r\n  b: 1\r\n", b"a:\r  b: 1\r"])
def test_byte_order_mark_and_line_ends(folder: Path, text: bytes):
    document = read(write("x.yaml", text))
    assert document.values == {"a": {"b": 1}}
    assert document.origin(("a", "b")).line == 2


def test_origins_are_the_lines_of_the_keys(folder: Path):
    write("sub/x.yaml", "a:\n  b: 1\n  c:\n    - x\n    - y\n")
    document = read("sub/x.yaml")
    assert str(document.origin(("a",))) == "sub/x.yaml:1"
    assert str(document.origin(("a", "b"))) == "sub/x.yaml:2"
    assert str(document.origin(("a", "c", 1))) == "sub/x.yaml:5"
    assert str(document.origin(("a", "zz", "deep"))) == "sub/x.yaml:1"
    assert str(document.origin(("other",))) == "sub/x.yaml"


def test_includes_merge_deeply_and_keep_order(folder: Path):
    write(
        "deep/base.yaml", "mesh: {data: 4, tensor: 2}\nmodel: {layers: 2, width: 8}\nfiles: [a, b]"
    )
    write("deep/mid.yaml", "include: base.yaml\nmodel: {width: 16}\nname: mid")
    write(
        "x.yaml", "include: [deep/mid.yaml]\nmesh: {stage: 2, data: 8}\nfiles: [c]\nmodel:\n  k: 1"
    )
    document = read("x.yaml")
    assert document.values == {
        "mesh": {"data": 8, "tensor": 2, "stage": 2},
        "model": {"layers": 2, "width": 16, "k": 1},
        "files": ["c"],
        "name": "mid",
    }
    assert list(document.values["mesh"]) == ["data", "tensor", "stage"]
    assert str(document.origin(("model", "layers"))) == "deep/base.yaml:2"
    assert str(document.origin(("model", "width"))) == "deep/mid.yaml:2"
    assert str(document.origin(("model",))) == "x.yaml:4"
    assert ("files", 1) not in document.origins


def test_a_later_include_wins_and_may_share_a_base(folder: Path):
    write("base.yaml", "a: 0\nb: 0\nc: 0")
    write("one.yaml", "include: base.yaml\na: 1\nb: 1")
    write("two.yaml", "include: base.yaml\nb: 2")
    assert read(write("x.yaml", "include: [one.yaml, two.yaml]")).values == {"a": 0, "b": 2, "c": 0}


def test_another_type_replaces_the_mapping(folder: Path):
    write("base.yaml", "optim: {type: adamw, betas: [1, 2]}\ndata: {type: text, window: 4}")
    document = read(
        write("x.yaml", "include: base.yaml\noptim: {type: sgd}\ndata: {type: text, seed: 1}")
    )
    assert document.values["optim"] == {"type": "sgd"}
    assert document.values["data"] == {"type": "text", "window": 4, "seed": 1}


def test_replace_lists_mappings_that_are_not_merged(folder: Path):
    write("base.yaml", "mesh: {data: 8}\na: {b: {c: 1}, k: 1}")
    write("x.yaml", "include: base.yaml\nreplace: [mesh, a.b]\nmesh: {tensor: 8}\na: {b: {d: 2}}")
    document = read("x.yaml")
    assert document.values == {"mesh": {"tensor": 8}, "a": {"b": {"d": 2}, "k": 1}}
    assert ("mesh", "data") not in document.origins


def test_replace_that_does_nothing_is_refused(folder: Path):
    write("base.yaml", "a: 1")
    write("x.yaml", "include: base.yaml\nreplace: mehs\nmesh: {a: 1}")
    refused("x.yaml:2: the key replace lists mehs, which this file does not set")
    write("x.yaml", "replace: mesh\nmesh: {a: 1}")
    refused("x.yaml:1: replace has no effect without include")


def test_an_include_cycle_is_shown(folder: Path):
    write("a.yaml", "include: sub/b.yaml")
    write("sub/b.yaml", "x: 1\ninclude: ../a.yaml")
    refused(
        "sub/b.yaml:2: include: files include each other: a.yaml -> sub/b.yaml -> a.yaml", "a.yaml"
    )


def test_includes_are_counted(folder: Path):
    for level in range(8):
        write(f"{level}.yaml", f"include: [{level + 1}.yaml, {level + 1}.yaml]")
    write("8.yaml", "a: 1")
    refused(f"more than {MAX_FILES} files are included", "0.yaml")


@pytest.mark.parametrize("value", ["3", "[a.yaml, 3]", "{a: b}", "''"])
def test_an_include_is_text(folder: Path, value: str):
    write("a.yaml", "")
    write("x.yaml", f"k: 1\ninclude: {value}")
    refused("x.yaml:2: include must be text or a list of texts (file names), but is ")


def test_a_missing_file_suggests_a_neighbour(folder: Path):
    write("gpt/quickstart.yaml", "")
    refused(
        "gpt/quikstart.yaml: no such file; did you mean 'gpt/quickstart.yaml'?",
        "gpt/quikstart.yaml",
    )
    refused("gpt/zzz: no such file; in gpt there are: quickstart.yaml", "gpt/zzz")
    refused("nowhere/x.yaml: no such file (there is no folder nowhere", "nowhere/x.yaml")
    refused("no such file", "gpt/quickstart.yaml/x.yaml")
    refused(
        "configs/gpt/lamb.yaml: no such file; `jaxdist init gpt/lamb` writes this file",
        "configs/gpt/lamb.yaml",
    )
    shipped = "; `jaxdist init` writes the shipped configs to configs"
    refused(
        f"configs/x/y.yaml: no such file (there is no folder configs/x to read){shipped}",
        "configs/x/y.yaml",
    )
    refused(f"zzz.yaml: no such file{shipped}", "zzz.yaml")
    write("x.yaml", "a: 1\ninclude: gpt/quickstar.yaml")
    refused(
        "x.yaml:2: include: gpt/quickstar.yaml: no such file; did you mean 'gpt/quickstart.yaml'?"
    )


def test_a_run_directory_is_the_config_in_it(folder: Path):
    Path("runs/one").mkdir(parents=True)
    Path("runs/one/config.yaml").write_text("a: 1\n", encoding="utf-8")
    found = read("runs/one", ["b=2"])
    assert (found.values, found.path) == ({"a": 1, "b": 2}, Path("runs/one/config.yaml"))


def test_what_is_no_file_is_refused(folder: Path):
    Path("x.yaml").mkdir()
    refused("x.yaml is a directory; name a YAML file")
    os.mkfifo("fifo.yaml")
    refused("fifo.yaml is a pipe", "fifo.yaml")
    refused("cannot be read: File name too long", "a" * 300)
    refused("'a\\x00b': the file name contains a null character", "a\0b")


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_an_unreadable_file_by_its_mode(folder: Path):
    Path(write("x.yaml", "a: 1")).chmod(0)
    refused("x.yaml: cannot be read: Permission denied")


def test_an_unreadable_file(folder: Path, monkeypatch: pytest.MonkeyPatch):
    write("x.yaml", "a: 1")

    def denied(*args: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", denied)
    refused("x.yaml: cannot be read: Permission denied")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"a: \xff", "x.yaml: the file is not UTF-8 text (byte 0xff at offset 3)"),
        (b"\x00\x01", "x.yaml:1: not valid YAML: special characters are not allowed"),
        (
            b"a:\n\tb: 1",
            "x.yaml:2: not valid YAML: found character '\\t' that cannot start any token; ",
        ),
        (b"a:\n\tb: 1", "indent with spaces, not tabs"),
        (
            b"a: 1\nb: x: y",
            "x.yaml:2: not valid YAML: mapping values are not allowed here; put quotes",
        ),
        (b"a: [1\n", "x.yaml:2: not valid YAML: expected ',' or ']'"),
        (
            b"- 1\n- 2",
            "x.yaml:1: the top level must be a mapping (`key: value` lines), found a list",
        ),
        (b"word", "x.yaml:1: the top level must be a mapping (`key: value` lines), found 'word'"),
        (b"a: 1\nb: 2\na: 3", "x.yaml:3: the key 'a' is set twice, first at x.yaml:1"),
        (b"a: 1\n2: 3", "x.yaml:2: a key must be text, but this key is 2; put quotes"),
        (b"null: 3", "a key must be text, but this key is None"),
        (b"? [a]\n: 3", "x.yaml:1: a key must be text, but this key is a list or mapping"),
        (b"k: &a {b: 1}\nc:\n  <<: *a", "x.yaml:3: '<<' is not part of YAML 1.2; use `include:`"),
        (
            b"a: !!python/object:os.system x",
            "x.yaml:1: the tag 'tag:yaml.org,2002:python/object:os",
        ),
        (b"a: !env {b: 1}", "x.yaml:1: the tag '!env' is not supported; remove the tag"),
        (b"a: 1\n---\nb: 1", "x.yaml:2: a second YAML document ('---') begins here"),
        (b"%YAML 1.1\n---\na: on", "x.yaml:2: directives ('%...') are not supported"),
        (b"a: *b", "x.yaml:1: '*b' refers to an anchor '&b' that is not complete"),
        (b"a: &b [*b]", "x.yaml:1: '*b' refers to an anchor '&b' that is not complete"),
        (b'a: "\\ud800"', "x.yaml:1: '\\ud800' contains half of a \\u surrogate pair"),
        (b'a: "\\U00110000"', "x.yaml:1: not valid YAML: a \\U escape beyond 10FFFF"),
        (b'a: "\\UFFFFFFFF"', "x.yaml:1: not valid YAML: a \\U escape beyond 10FFFF"),
        (b"a: " + b"9" * 5000, "x.yaml:1: the number has 5000 digits; at most 80"),
        (b"a: 0x" + b"f" * 5000, "x.yaml:1: the number has 5002 digits; at most 80"),
        (
            b"a: " + b"[" * 100 + b"]" * 100,
            f"x.yaml:1: values are nested more than {MAX_DEPTH} levels deep",
        ),
        (
            b"a: [" + b"1," * MAX_VALUES + b"]",
            f"x.yaml:1: the file has more than {MAX_VALUES} values",
        ),
        (b"a" * (MAX_BYTES + 1), f"x.yaml is larger than {MAX_BYTES} bytes"),
    ],
)
def test_bad_text_is_refused_with_its_line(folder: Path, text: bytes, message: str):
    write("x.yaml", text)
    refused(message)


def test_the_limit_of_size_counts_all_files_and_acts_before_they_are_parsed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    parsed = []
    monkeypatch.setattr(parse, "YAML", lambda **_: parsed.append(1))
    write("half.yaml", b"#" * (MAX_BYTES // 2 + 1))
    write("large.yaml", b"#" * (MAX_BYTES + 1))
    refused(f"large.yaml is larger than {MAX_BYTES} bytes, the most that a config", "large.yaml")
    with pytest.raises(
        ConfigError, match=f"override .*: the config is longer than {MAX_BYTES} characters"
    ):
        read(None, ["a=" + "#" * (MAX_BYTES + 1)])
    assert not parsed
    monkeypatch.undo()
    monkeypatch.chdir(folder)
    write("x.yaml", "include: [half.yaml, half.yaml]")
    refused(f"half.yaml is larger than {MAX_BYTES} bytes, together with the files before it")


@pytest.mark.parametrize("line", ["a: 1\n", "{}: 1\n"])
def test_a_thousand_mistakes_fill_no_more_than_a_page(folder: Path, line: str):
    write("x.yaml", "".join(line.format(f"key{n}") for n in range(1000)))
    with pytest.raises(ConfigError) as caught:
        load("x.yaml")
    assert len(str(caught.value).splitlines()) < 60
    assert "more" in str(caught.value).splitlines()[-1]


def test_several_bad_keys_are_reported_together(folder: Path):
    write("x.yaml", "1: a\nb: !t x\nc: 1\nc: 2")
    with pytest.raises(ConfigError) as caught:
        read("x.yaml")
    assert [line[:8] for line in str(caught.value).splitlines()] == [
        f"x.yaml:{n}" for n in (1, 2, 4)
    ]


def test_an_alias_is_followed(folder: Path):
    document = read(write("x.yaml", "a: &a {b: [1, 2]}\nc: *a"), ["c.b.0=9"])
    assert document.values == {"a": {"b": [1, 2]}, "c": {"b": [9, 2]}}
    assert str(document.origin(("c",))) == "x.yaml:2"


def test_an_alias_bomb_costs_nothing(folder: Path):
    levels = ["a0: &a0 [1, 2]"]
    levels += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 15)]
    write("x.yaml", "\n".join(levels))
    tracemalloc.start()
    refused(f"more than {MAX_VALUES} values, including the values that aliases")
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 20e6


def test_aliases_cannot_nest_past_the_depth_limit(folder: Path):
    write(
        "x.yaml", "\n".join(["a0: &a0 [1]", *(f"a{n}: &a{n} [*a{n - 1}]" for n in range(1, 100))])
    )
    refused(f"nested more than {MAX_DEPTH} levels deep")
