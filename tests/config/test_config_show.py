from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import Field, field_validator
from rich.cells import cell_len
from sample_schema import BASE, AdamW, Data, Run, Sgd, Split

from jaxdist.config import (
    Config,
    Document,
    Origin,
    ResolvedValue,
    dotted,
    json_schema,
    provenance,
    read,
    render_rows,
    resolved_yaml,
    validate,
)


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("base.yaml").write_text(BASE)
    return "base.yaml"


def rows_of(base: str, *overrides: str) -> list[ResolvedValue]:
    document = read(base, overrides)
    return provenance(document, validate(document, Run))


def test_provenance_lists_every_value_in_field_order(base: str):
    rows = rows_of(base, "optim.learning_rate=2", "stages=[{dcn: 1, ici: 2}]")
    assert [(dotted(row.path), row.value, str(row.origin)) for row in rows] == [
        ("mesh.data", 4, "base.yaml:5"),
        ("mesh.tensor.dcn", 2, "base.yaml:5"),
        ("mesh.tensor.ici", 4, "base.yaml:5"),
        ("optim.type", "adamw", "base.yaml:1"),
        ("optim.learning_rate", 2.0, "override 'optim.learning_rate=2'"),
        ("optim.betas", [0.9, 0.999], "default"),
        ("data.files", ["a.txt", "b.txt"], "base.yaml:3"),
        ("data.window", 4, "base.yaml:4"),
        ("data.shuffle", True, "default"),
        ("evaluate", None, "default"),
        ("schedule", "cosine", "default"),
        ("devices", "auto", "default"),
        ("stages.0.dcn", 1, "override 'stages=[{dcn: 1, ici: 2}]'"),
        ("stages.0.ici", 2, "override 'stages=[{dcn: 1, ici: 2}]'"),
        ("name", "run", "default"),
        ("arguments", {}, "default"),
    ]


def test_a_list_of_two_origins_is_shown_by_item(base: str):
    rows = {dotted(row.path): str(row.origin) for row in rows_of(base, "data.files.1=c.txt")}
    assert rows["data.files.0"] == "base.yaml:3"
    assert rows["data.files.1"] == "override 'data.files.1=c.txt'"


def test_a_value_that_a_validator_expands_keeps_its_origin():
    class Tree(Config):
        mesh: dict[str, int] = {"data": 1}  # noqa: RUF012 (pydantic copies it)

        @field_validator("mesh", mode="before")
        @classmethod
        def _from_size(cls, value: Any) -> Any:
            return {"data": value} if isinstance(value, int) else value

    document = Document({"mesh": 8}, {("mesh",): Origin("x.yaml", 3)})
    assert provenance(document, validate(document, Tree)) == [
        ResolvedValue(("mesh", "data"), 8, Origin("x.yaml", 3))
    ]


def test_render_aligns_the_columns():
    rows = [
        ResolvedValue(("a",), "text", Origin("x.yaml", 1)),
        ResolvedValue(("b", "long"), None, Origin("default")),
        ResolvedValue(("c",), "null", Origin("default")),
        ResolvedValue(("d",), [1, True], Origin("default")),
        ResolvedValue(("e",), "", Origin("default")),
        ResolvedValue(("f",), "two\nlines", Origin("default")),
    ]
    assert render_rows(rows).splitlines() == [
        "a       text          x.yaml:1",
        "b.long  null          default",
        'c       "null"        default',
        "d       [1, true]     default",
        'e       ""            default',
        'f       "two\\nlines"  default',
    ]
    assert render_rows([]) == ""


def test_render_keeps_line_numbers_and_the_start_of_overrides():
    rows = [
        ResolvedValue(
            ("section", "key"), "v" * 200, Origin("a/very/long/path/to/some/configs/x.yaml", 123)
        ),
        ResolvedValue(
            ("k" * 90,), 1, Origin("override 'mesh={data: 4, tensor: 2, stage: 2, context: 8}'")
        ),
    ]
    lines = render_rows(rows).splitlines()
    assert [len(line) for line in lines] == [80, 79]
    assert lines[0].endswith("configs/x.yaml:123")
    assert "vvv…" in lines[0]
    assert lines[1].endswith("  override 'mesh={data: 4,…")


@settings(max_examples=50, database=None)
@given(
    st.lists(
        st.builds(
            ResolvedValue,
            st.lists(st.text(min_size=1) | st.integers(0, 9), max_size=3).map(tuple),
            st.none() | st.text() | st.lists(st.text(), max_size=3),
            st.builds(Origin, st.text(), st.none() | st.integers(1, 999)),
        ),
        max_size=4,
    ),
    st.integers(20, 120),
)
def test_render_never_exceeds_the_width(rows: list[ResolvedValue], width: int):
    printable = [
        row for row in rows if str(row.origin).isprintable() and dotted(row.path).isprintable()
    ]
    text = render_rows(printable, width)
    assert len(text.split("\n")) == max(len(printable), 1)
    assert all(cell_len(line) <= width for line in text.split("\n"))


AWKWARD = (
    "on|null|1e-3|.5e3|2024-01-31|<<|=|~|- a|a: b|#| x|\t|é|0x1F|1_000|!x|*a|'|\"|a\nb\n|\\|%|@|---"
)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=9) | st.sampled_from(
    [*AWKWARD.split("|"), "---", "...", "{", ",", "|", "\x85", "a\u2028b"]
)
SIZE = st.integers(1, 10**6)
SPLIT = st.builds(Split, dcn=SIZE, ici=SIZE)
RATE = st.floats(1e-12, 1e12)
DATA = st.builds(
    Data,
    files=st.lists(TEXT.map(Path), min_size=1, max_size=3),
    window=SIZE.map(lambda size: 2 * size),
    shuffle=st.booleans(),
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
).filter(lambda value: "Infinity" not in json.dumps(value))
RUN = st.builds(
    Run,
    mesh=st.dictionaries(TEXT, SIZE | SPLIT, max_size=3),
    optim=st.builds(AdamW, type=st.just("adamw"), learning_rate=RATE, betas=st.tuples(RATE, RATE))
    | st.builds(Sgd, type=st.just("sgd"), momentum=st.none() | st.floats(0, 0.99)),
    data=DATA,
    evaluate=st.none() | DATA,
    devices=SIZE | st.just("auto"),
    stages=st.lists(SPLIT, max_size=2),
    name=TEXT,
    arguments=st.dictionaries(TEXT, JSON, max_size=3),
)


@pytest.mark.full
@settings(max_examples=60, database=None)
@given(RUN)
def test_resolved_yaml_loads_back_to_the_same_tree(tmp_path_factory: Any, run: Run):
    file = tmp_path_factory.getbasetemp() / "resolved.yaml"
    file.write_text(resolved_yaml(run), encoding="utf-8", newline="")
    loaded = validate(read(file), Run)
    assert loaded == run
    assert list(loaded.mesh) == list(run.mesh)


def test_resolved_yaml_is_readable(base: str):
    text = resolved_yaml(validate(read(base), Run))
    assert text.startswith(
        "mesh:\n  data: 4\n  tensor:\n    dcn: 2\n    ici: 4\noptim:\n  type: adamw\n"
    )
    assert "  files:\n  - a.txt\n" in text
    assert "evaluate: null\n" in text


def test_json_schema_completes_keys_and_allows_includes():
    schema = json.loads(json_schema(Run))
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert list(schema["properties"])[:4] == ["include", "replace", "mesh", "optim"]
    assert schema["properties"]["data"]["description"] == "Training data."
    assert schema["additionalProperties"] is False
    assert schema["properties"]["schedule"]["enum"] == ["cosine", "linear", "poly"]
    adamw = schema["$defs"]["AdamW"]["properties"]
    assert adamw["learning_rate"]["description"] == "Peak learning rate."
    assert adamw["learning_rate"]["exclusiveMinimum"] == 0


def test_a_description_reaches_the_json_schema_from_a_parent_and_from_a_union():
    class Nesterov(Sgd):
        momentum: float | None = 0.9
        damping: float = 0.0
        """Damping of the velocity."""

    class Tree(Config):
        optim: Nesterov | AdamW | None = None
        import_: int = Field(default=1, alias="import")
        """A number under another key."""

    schema = json.loads(json_schema(Tree))
    nesterov, adamw = (schema["$defs"][name]["properties"] for name in ("Nesterov", "AdamW"))
    assert nesterov["learning_rate"]["description"] == "Peak learning rate."
    assert nesterov["damping"]["description"] == "Damping of the velocity."
    assert "description" not in nesterov["momentum"]  # The field is declared again without a text.
    assert adamw["betas"]["description"] == "Decay of the two moments."
    assert schema["properties"]["import"]["description"] == "A number under another key."


def test_the_json_schema_of_a_section_without_source_has_no_descriptions():
    scope: dict[str, Any] = {"Config": Config, "__name__": "no_such_module"}
    exec('class Tree(Config):\n    a: int = 1\n    """A number."""\n', scope)
    assert "description" not in json.loads(json_schema(scope["Tree"]))["properties"]["a"]


def test_json_schema_leaves_presence_to_the_merged_tree():
    schema = json.loads(json_schema(Run))
    assert "required" not in schema
    assert "required" not in schema["$defs"]["Data"]
    assert "anyOf" in schema["properties"]["optim"]


def test_a_field_may_be_called_required():
    class Tree(Config):
        required: int = 1
        oneOf: int = 2  # noqa: N815 (the name under test)
        discriminator: int = 3

    properties = json.loads(json_schema(Tree))["properties"]
    assert set(properties) == {"include", "replace", "required", "oneOf", "discriminator"}
