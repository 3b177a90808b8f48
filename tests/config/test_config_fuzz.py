"""Whatever stands in the file, it validates or gives one ConfigError that names the file."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from ruamel.yaml import YAML
from sample_schema import BASE, Run

from jaxdist.config import KeyPath, provenance, read, render_rows, resolved_yaml, validate
from jaxdist.errors import ConfigError

FUZZ = settings(max_examples=150, database=None)

BASE_VALUES: dict[str, Any] = YAML(typ="safe", pure=True).load(BASE) | {
    "evaluate": {"files": ["c"], "window": 8},
    "stages": [{"dcn": 1, "ici": 2}],
    "devices": 4,
}
NUMBERS = [0, -1, 1.5, 2**63, 10**70, 10**400, float("inf"), float("nan")]
TEXTS = [
    "",
    "x",
    "é",
    "\U0001f600",
    "auto",
    "adamw",
    "4",
    "\0",
    "\u2028",
    "a" * 500,
    "type",
    "1e-3",
]
SCALARS = st.sampled_from([None, True, *NUMBERS, *TEXTS])
GARBAGE = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            SCALARS | st.sampled_from(["dcn", "ici", "files", "window"]), inner, max_size=3
        )
    ),
    max_leaves=5,
)


def paths(value: Any, path: KeyPath = ()) -> list[KeyPath]:
    children = value.items() if isinstance(value, dict) else ()
    children = enumerate(value) if isinstance(value, list) else children
    return [path, *(found for key, child in children for found in paths(child, (*path, key)))]


def mutate(values: Any, path: KeyPath, action: str, garbage: Any) -> Any:
    """`values` with one place dropped, renamed, wrapped, nested or replaced."""
    if not path:
        return garbage if action == "replace" else {"data": values}
    *parents, last = path
    at = values
    for key in parents:
        at = at[key]
    if action == "drop":
        del at[last]
    elif action == "rename" and isinstance(at, dict):
        at[garbage if isinstance(garbage, str | int | float | None) else "renamed"] = at.pop(last)
    elif action == "wrap":
        at[last] = [at[last]]
    elif action == "nest":
        at[last] = {str(last): at[last]}
    elif action == "extra" and isinstance(at[last], dict):
        at[last]["extra"] = garbage
    else:
        at[last] = garbage
    return values


MUTATIONS = st.lists(
    st.tuples(
        st.integers(0, 99),
        st.sampled_from(["drop", "rename", "wrap", "nest", "extra", "replace"]),
        GARBAGE,
    ),
    min_size=1,
    max_size=3,
)


def load(file: Path, data: bytes | str, overrides: list[str] | None = None) -> str:
    """The message of the ConfigError, or "" when the file validates and can be shown."""
    file.write_bytes(data.encode("utf-8", "surrogatepass") if isinstance(data, str) else data)
    try:
        document = read(file, overrides or [])
        run = validate(document, Run)
    except ConfigError as error:
        return str(error)
    assert render_rows(provenance(document, run))
    assert resolved_yaml(run)
    return ""


def check(file: Path, data: bytes | str, overrides: list[str] | None = None) -> str:
    message = load(file, data, overrides)
    assert not message or str(file) in message or "override " in message
    assert "Input should" not in message
    assert "pydantic" not in message
    return message


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / "x.yaml"


@pytest.mark.full
@FUZZ
@given(MUTATIONS)
def test_mutated_trees(file: Path, mutations: list[tuple[int, str, Any]]):
    values: Any = copy.deepcopy(BASE_VALUES)
    for index, action, garbage in mutations:
        places = paths(values)
        values = mutate(values, places[index % len(places)], action, copy.deepcopy(garbage))
    stream = io.StringIO()
    yaml = YAML(typ="safe", pure=True)
    yaml.allow_unicode = True
    yaml.sort_base_mapping_type_on_output = False  # pyright: ignore[reportAttributeAccessIssue] (untyped in ruamel)
    yaml.dump(values, stream)
    check(file, stream.getvalue())


@pytest.mark.full
@FUZZ
@given(
    st.integers(0, len(BASE)),
    st.integers(0, 20),
    st.text(max_size=4) | st.sampled_from("&*!|>%@`{}[]:,#?-'\"\t\n"),
)
def test_mutated_text(file: Path, start: int, length: int, inserted: str):
    try:
        inserted.encode()
    except UnicodeEncodeError:
        inserted = "\ufffd"
    check(file, BASE[:start] + inserted + BASE[start + length :])


@FUZZ
@given(st.binary(max_size=200))
@example(b"\xff\xfea\x00:\x00")
@example(b'"\\UFFFFFFFF"')
@example(b"? ? ? a")
@example(b"a: 0b")
@example(b"a: |\n b\n\tc")
def test_binary_garbage(file: Path, data: bytes):
    assert check(file, data), "garbage is never a run"


@pytest.mark.full
@FUZZ
@given(
    st.lists(
        st.sampled_from(["optim", "data", "files", "0", "9", "mesh", "type", "x", ""]), max_size=4
    ),
    GARBAGE.map(str) | st.text(max_size=20),
)
def test_overrides(file: Path, keys: list[str], value: str):
    check(file, BASE, [f"{'.'.join(keys)}={value}"])


@pytest.mark.parametrize("path", [path for path in paths(BASE_VALUES) if path])
def test_null_everywhere_and_every_key_dropped(file: Path, path: KeyPath):
    for action in ("drop", "replace", "rename"):
        stream = io.StringIO()
        values = mutate(
            copy.deepcopy(BASE_VALUES), path, action, "zz" if action == "rename" else None
        )
        YAML(typ="safe", pure=True).dump(values, stream)
        message = check(file, stream.getvalue())
        if message:
            problems = message.splitlines()[1:]
            assert all(line.startswith((f"  {path[0]}", "  zz =")) for line in problems)
