from __future__ import annotations

import re
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import AfterValidator, Field, RootModel, ValidationError
from sample_schema import BASE, AdamW, Data, Run, Split

from jaxdist.config import Config, Document, Problem, problems_error, read, validate
from jaxdist.config.describe import describe_type
from jaxdist.config.explain import explain_problems
from jaxdist.errors import ConfigError

JARGON = re.compile(
    r"Input should|pydantic|valid dictionary|instance of|union_tag|errors\.|value_error|"
    r"https?:|\[type=|input_value|NoneType|\bdict\b|\bint\b|\bstr\b"
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("base.yaml").write_text(BASE)
    return tmp_path


def problems(*overrides: str, file: str = "base.yaml") -> list[str]:
    with pytest.raises(ConfigError) as caught:
        validate(read(file, overrides), Run)
    assert not JARGON.search(str(caught.value))
    return [line.strip() for line in str(caught.value).splitlines()]


def test_a_good_file_validates(folder: Path):
    run = validate(read("base.yaml", ["data.window=8", "devices=2"]), Run)
    assert run == Run(
        optim=AdamW(type="adamw", learning_rate=1e-3),
        data=Data(files=[Path("a.txt"), Path("b.txt")], window=8),
        mesh={"data": 4, "tensor": Split(dcn=2, ici=4)},
        devices=2,
    )
    assert list(run.mesh) == ["data", "tensor"]


def test_a_config_is_frozen_and_strict():
    split = Split(dcn=1, ici=2)
    with pytest.raises(ValidationError, match="frozen"):
        split.dcn = 2
    with pytest.raises(ValidationError, match="valid integer"):
        Split(dcn="1", ici=2)  # pyright: ignore[reportArgumentType] (refused on purpose)


def test_all_problems_are_reported_at_once(folder: Path):
    Path("x.yaml").write_text(
        "include: base.yaml\n"
        "optim:\n"
        "  learning_rte: 3\n"
        "  betas: [0.9]\n"
        "data: {window: 3, shuffle: 1}\n"
        "schedule: cosin\n"
        "mesh: {tensor: {dcn: 0, ici: x, extra: 1}}\n"
    )
    assert problems("devices=-1", file="x.yaml") == [
        "9 problems in x.yaml:",
        "mesh.tensor.dcn = 0 (x.yaml:7): expected a whole number of at least 1",
        "mesh.tensor.ici = 'x' (x.yaml:7): expected a whole number of at least 1",
        "mesh.tensor.extra = 1 (x.yaml:7): unknown key; allowed: dcn, ici",
        "optim.betas.1 (not set in optim.betas, x.yaml:4): "
        "required, but not set; expected a number",
        "optim.learning_rte = 3 (x.yaml:3): unknown key; did you mean 'learning_rate'? "
        "(allowed: type, learning_rate, betas)",
        "data.window = 3 (x.yaml:5): a window of 3 is odd; use 4",
        "data.shuffle = 1 (x.yaml:5): expected true or false",
        "schedule = 'cosin' (x.yaml:6): did you mean 'cosine'? (allowed: cosine, linear, poly)",
        "devices = -1 (override 'devices=-1'): expected a whole number greater than 0, or 'auto'",
    ]


MESH_SIZE = "expected a whole number of at least 1, or a mapping"


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("data.window='4'", "data.window = '4' (@): expected a whole number of at least 1"),
        ("data.window=true", "data.window = True (@): expected a whole number of at least 1"),
        ("data.window=4.0", "data.window = 4.0 (@): expected a whole number of at least 1"),
        ("data.window=0", "data.window = 0 (@): expected a whole number of at least 1"),
        ("data.shuffle=yes", "data.shuffle = 'yes' (@): expected true or false"),
        ("data.files=a.txt", "data.files = 'a.txt' (@): expected a list (each item: a path)"),
        ("data.files.1=3", "data.files.1 = 3 (@): expected a path"),
        (
            "data.files=[]",
            "data = {'files': [], 'window': 4} (base.yaml:2, @): files is empty; name",
        ),
        ("data=5", "data = 5 (@): expected a mapping"),
        ("data=[]", "data = [] (@): expected a mapping"),
        ("data=null", "data = None (@): expected a mapping"),
        ("evaluate=5", "evaluate = 5 (@): expected a mapping, or null"),
        (
            "evaluate={files: [a], window: 3}",
            "evaluate.window = 3 (@): a window of 3 is odd; use 4",
        ),
        ("evaluate.window=2", "evaluate.files (not set in evaluate, @): required, but not set; "),
        ("name=5", "name = 5 (@): expected text"),
        (
            "devices=atuo",
            "devices = 'atuo' (@): expected a whole number greater than 0, or 'auto'; ",
        ),
        ("devices=atuo", "; did you mean 'auto'?"),
        ("schedule=5", "schedule = 5 (@): expected 'cosine', 'linear', 'poly'"),
        ("mesh.data=x", f"mesh.data = 'x' (@): {MESH_SIZE}"),
        ("mesh.data=0", f"mesh.data = 0 (@): {MESH_SIZE}"),
        ("mesh.data=[1]", f"mesh.data = [1] (@): {MESH_SIZE}"),
        ("mesh.tensor={dcn: 1}", "mesh.tensor.ici (not set in mesh.tensor, @): required, but not "),
        (
            "mesh=4",
            "mesh = 4 (@): expected a mapping (each value: a whole number of at least 1, or",
        ),
        (
            "stages=[{dcn: 1, ici: 0}]",
            "stages.0.ici = 0 (@): expected a whole number of at least 1",
        ),
        (
            "optim.type=adamq",
            "optim.type = 'adamq' (@): did you mean 'adamw'? (allowed: adamw, sgd)",
        ),
        ("optim.type=5", "optim.type = 5 (@): allowed: adamw, sgd"),
        ("optim.type=[a]", "optim.type = ['a'] (@): allowed: adamw, sgd"),
        (
            "optim={lr: 1}",
            "optim.type (not set in optim, @): required, but not set; expected one of: ",
        ),
        ("optim=sgd", "optim = 'sgd' (@): expected a mapping with `type:` one of 'adamw', 'sgd'"),
        (
            "optim={type: sgd, momentum: 1}",
            "optim.momentum = 1 (@): expected a number of at least 0 ",
        ),
        (
            "optim.learning_rate=.inf",
            "optim.learning_rate = inf (@): expected a number greater than ",
        ),
        (
            "optim.learning_rate=.nan",
            "optim.learning_rate = nan (@): expected a number greater than ",
        ),
        (
            "optim.learning_rate=1e999",
            "optim.learning_rate = inf (@): expected a number greater than",
        ),
        (
            "optim.betas=[1, 2, 3]",
            "optim.betas = [1, 2, 3] (@): expected a list of 2 (a number; a num",
        ),
        (
            "zzz=1",
            "zzz = 1 (@): unknown key; allowed: mesh, optim, data, evaluate, schedule, devices,",
        ),
    ],
)
def test_each_problem_in_words(folder: Path, override: str, problem: str):
    header, *lines = problems(override)
    assert header == "1 problem in base.yaml:"
    assert problem.replace("@", f"override {override!r}") in lines[0]
    assert len(lines) == 1


def test_long_values_and_overrides_are_cut(folder: Path):
    line = problems(f"name=[{'long, ' * 30}]")[1]
    assert line.startswith("name = ['long', ")
    assert line.endswith("…): expected text")
    assert len(line) < 160


def test_missing_sections_of_an_empty_file(folder: Path):
    Path("x.yaml").write_text("")
    assert problems(file="x.yaml") == [
        "2 problems in x.yaml:",
        "optim (not set in x.yaml): required, but not set; "
        "expected a mapping with `type:` one of 'adamw', 'sgd'",
        "data (not set in x.yaml): required, but not set; expected a mapping",
    ]


def test_a_key_that_needs_quotes_is_quoted(folder: Path):
    Path("x.yaml").write_text("include: base.yaml\n'mesh.data': 3\n")
    assert problems(file="x.yaml")[1].startswith("'mesh.data' = 3 (x.yaml:2): unknown key; did you")


def test_cross_checks_report_in_the_same_form(folder: Path):
    document = read("base.yaml", ["devices=3"])
    error = problems_error(
        document,
        [
            Problem(("devices",), "3 devices do not hold 4 * 8"),
            Problem(("data", "shuffle"), "shuffle is true by default"),
            Problem((), "two\nlines"),
        ],
    )
    assert str(error).splitlines() == [
        "3 problems in base.yaml:",
        "  devices = 3 (override 'devices=3'): 3 devices do not hold 4 * 8",
        "  data.shuffle (not set in data, base.yaml:2): shuffle is true by default",
        "  (top level) (base.yaml): two",
        "    lines",
    ]
    assert error.exit_code == 2


class Colour(Enum):
    red = "red"
    blue = "blue"


def _no_spaces(text: str) -> str:
    if " " in text:
        raise ValueError(f"{text!r} has a space")
    return text


WHOLE = "expected a whole number"


@pytest.mark.parametrize(
    ("schema", "value", "expected"),
    [
        (Colour, "rde", {(): "did you mean 'red'? (allowed: red, blue)"}),
        (Colour | None, 3, {(): "expected 'red', 'blue', or null"}),
        (
            dict[Literal["data", "tensor"], int],
            {"tensr": 1},
            {("tensr",): "unknown key; did you mean 'tensor'? (allowed: data, tensor)"},
        ),
        (Annotated[str, AfterValidator(_no_spaces)] | int, "a b", {(): "'a b' has a space"}),
        (int | Annotated[str, AfterValidator(_no_spaces)], "a b", {(): "'a b' has a space"}),
        (
            Annotated[str | int, AfterValidator(str)],
            [1],
            {(): "expected text, or a whole number"},
        ),
        (
            list[dict[str, int] | int],
            [1, {"a": "b"}, "c"],
            {
                (1, "a"): WHOLE,
                (2,): "expected a mapping (each value: a whole number), or a whole number",
            },
        ),
        (dict[str, list[int]] | list[dict[str, int]], [{"a": 1}, {"b": None}], {(1, "b"): WHOLE}),
        (
            Split | dict[str, list[int]],
            {"dcn": 1, "ici": 0},
            {("ici",): "expected a whole number of at least 1"},
        ),
        (
            Annotated[list[int], Field(min_length=1)],
            [],
            {(): "expected a list with 1 or more entries (each item: a whole number)"},
        ),
        (tuple[int, ...], "x", {(): "expected a list (each item: a whole number)"}),
        (RootModel[dict[str, int]], {"a": "x"}, {("a",): WHOLE}),
        (
            Annotated[str, Field(pattern="^a+$", max_length=3)],
            "b",
            {(): "expected text of at most 3 characters and that matches '^a+$'"},
        ),
        (Any, {"a": [1]}, {}),
    ],
)
def test_other_annotations(schema: Any, value: Any, expected: dict):
    assert {
        problem.path: problem.message for problem in explain_problems(schema, value)
    } == expected
    assert len(explain_problems(schema, value)) == len(expected)


def test_a_tag_that_is_also_a_key_does_not_confuse_the_path():
    class Text(Config):
        type: Literal["text"]
        text: dict[str, int]

    class Images(Config):
        type: Literal["images"]

    class Tree(Config):
        data: Annotated[Text | Images, Field(discriminator="type")]

    document = Document({"data": {"type": "text", "text": {"text": "x"}}})
    with pytest.raises(
        ConfigError, match=re.escape("data.text.text = 'x' (a config from Python): expected")
    ):
        validate(document, Tree)


def test_an_alias_is_the_key_in_the_file():
    class Tree(Config):
        class_: int = Field(alias="class")

    message = r"class = 'x' \(a config from Python\): expected a whole number"
    with pytest.raises(ConfigError, match=message):
        validate(Document({"class": "x"}), Tree)
    assert validate(Document({"class": 3}), Tree).class_ == 3


def test_a_section_without_keys_says_so():
    class Empty(Config):
        pass

    with pytest.raises(ConfigError, match=r"a = 1 .*unknown key; this mapping must have no keys"):
        validate(Document({"a": 1}), Empty)


@pytest.mark.parametrize(
    ("annotation", "words"),
    [
        (Annotated[float, Field(gt=0, le=1)], "a number greater than 0 and of at most 1"),
        (Annotated[int, Field(multiple_of=8)], "a whole number that is a multiple of 8"),
        (float | None, "a number, or null"),
        (tuple[int, str], "a list of 2 (a whole number; text)"),
        (dict, "a mapping"),
        (list, "a list"),
        (Path | Literal["stdlib"], "a path, or 'stdlib'"),
    ],
)
def test_describe(annotation: Any, words: str):
    assert describe_type(annotation) == words
