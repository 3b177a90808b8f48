"""Pages for users: settings that they name exist, and messages that they quote are the code's."""

from __future__ import annotations

import ast
import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from documents import ROOT, blocks
from ruamel.yaml import YAML

import jaxdist
from jaxdist.config import json_schema
from jaxdist.experiment import ExperimentConfig

DOCS = ROOT / "docs"
KEY = re.compile(r"`([a-z_]+(?:\.\w+)+)(?::[^`]*)?`")
FORMAT = "\0"
"""What a message has where a value is put in."""


def keys(node: dict, schema: dict, path: tuple[str, ...] = (), seen: tuple = ()) -> Iterator[str]:
    """Every path of settings that a schema allows."""
    if "$ref" in node:
        name = node["$ref"].split("/")[-1]
        if name not in seen:
            yield from keys(schema["$defs"][name], schema, path, (*seen, name))
    for way in ("anyOf", "oneOf", "allOf"):
        for part in node.get(way, []):
            yield from keys(part, schema, path, seen)
    for key, child in node.get("properties", {}).items():
        yield ".".join((*path, key))
        yield from keys(child, schema, (*path, key), seen)


@pytest.fixture(scope="module")
def settings() -> set[str]:
    schema = json.loads(json_schema(ExperimentConfig))
    return set(keys(schema, schema))


def named(text: str, settings: set[str], column: int | None = None) -> set[str]:
    """Settings that a text names; with `column`, in that column of its tables alone."""
    sections = {path for path in settings if "." not in path}
    if column is not None:
        rows = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("| ")]
        text = "\n".join(row[column] for row in rows)
    found = {path for path in KEY.findall(text) if path.split(".")[0] in sections}
    return found - {"metrics.jsonl"}  # a file


def test_settings_beside_those_of_others_exist(settings: set[str]) -> None:
    found = named((DOCS / "coming_from.md").read_text(), settings, column=1)
    assert len(found) > 50
    assert found <= settings, found - settings


@pytest.mark.parametrize("page", ["faq", "troubleshooting", "versions", "tutorial"])
def test_settings_that_pages_name_exist(page: str, settings: set[str]) -> None:
    found = named((DOCS / f"{page}.md").read_text(), settings)
    assert found <= settings, found - settings


def test_types_that_pages_choose_exist() -> None:
    schema = json_schema(ExperimentConfig)
    for page in DOCS.glob("*.md"):
        for kind in re.findall(r"`[a-z_.]+\.type: (\w+)`", page.read_text()):
            assert re.search(rf'"const": "{kind}"', schema), (page, kind)


def test_a_setting_that_is_gone_is_found(settings: set[str]) -> None:
    text = "| theirs | ours |\n| `train.gone` | `train.gone: 3`, `train.steps` |\n"
    assert named(text, settings, column=1) - settings == {"train.gone"}


def messages(source: str) -> Iterator[str]:
    """The texts of a module, with a mark where values are put in; joined ones as one."""

    def text(node: ast.AST) -> str:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return node.value
        if isinstance(node, ast.JoinedStr):
            return "".join(text(part) for part in node.values)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            return text(node.left) + text(node.right)
        return FORMAT

    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant | ast.JoinedStr | ast.BinOp):
            yield text(node)


@pytest.fixture(scope="module")
def texts() -> list[str]:
    files = Path(jaxdist.__file__).parent.rglob("*.py")
    return [text for file in files for text in messages(file.read_text()) if len(text) > 10]


def printed(quoted: str, texts: list[str]) -> bool:
    """Whether one text of the code has all the words of a quoted message, in their order."""
    parts = [part.strip() for part in quoted.split("...")]
    pattern = re.compile(".*".join(re.escape(part) for part in parts if part), re.S)
    return any(pattern.search(text) for text in texts)


QUOTED = [
    line for block in blocks(DOCS / "troubleshooting.md", "text") for line in block.splitlines()
]


@pytest.mark.parametrize("quoted", QUOTED, ids=lambda text: text.replace("...", " ").strip()[:30])
def test_a_quoted_message_is_one_that_the_code_prints(quoted: str, texts: list[str]) -> None:
    assert printed(quoted, texts)


def test_a_message_of_nobody_is_found(texts: list[str]) -> None:
    assert len(QUOTED) > 15
    assert not printed("mesh ... needs ... device, but", texts)


GERMANISMS = re.compile(
    r"\b(anew|goes on|stands? (in|for itself)|is told|are told|so many|and said|"
    r"dearest|plays? (through|back)|of ours)\b"
)
"""Idioms of another language that readers stumbled over."""


@pytest.mark.parametrize("page", sorted((DOCS / "guides").glob("*.md")), ids=lambda path: path.stem)
def test_guides_are_plain_english(page: Path) -> None:
    prose = re.sub(r"^```.*?^```$|`[^`]*`", "", page.read_text(), flags=re.S | re.M)
    assert [found[0] for found in GERMANISMS.finditer(prose)] == []


def test_each_definition_of_the_glossary_has_its_own_line() -> None:
    """A definition that follows its term on the same line is shown as a plain paragraph."""
    _, *entries = (DOCS / "glossary.md").read_text().split("\n## ", 1)[1].strip().split("\n\n")
    wrong = [entry for entry in entries if not re.match(r"## |[^\n]+\n:   \S", entry)]
    assert len(entries) > 100
    assert not wrong, wrong


def test_a_word_has_one_meaning() -> None:
    terms = re.findall(r"^(\S.*)\n:   ", (DOCS / "glossary.md").read_text(), re.M)
    assert len(terms) > 40
    assert len(terms) == len(set(terms))


REFERENCES = sorted((DOCS / "reference").glob("*.md"))


@pytest.mark.parametrize("page", REFERENCES, ids=lambda path: path.stem)
def test_modules_of_the_reference_exist(page: Path) -> None:
    names = re.findall(r"^::: ([\w.]+)$", page.read_text(), re.M)
    files = [ROOT.joinpath(*name.split(".")) for name in names]
    assert names or page.stem == "index"
    assert [
        file for file in files if not (file.is_dir() or file.with_suffix(".py").is_file())
    ] == []


def test_the_citation_is_of_this_version() -> None:
    cited = YAML(typ="safe").load((ROOT / "CITATION.cff").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert (cited["version"], cited["license"]) == (project["version"], project["license"])
    assert cited["authors"] == project["authors"]


def test_a_bug_report_asks_for_the_doctor() -> None:
    form = YAML(typ="safe").load((ROOT / ".github/ISSUE_TEMPLATE/bug.yml").read_text())
    (doctor,) = (part for part in form["body"] if part.get("id") == "doctor")
    assert "jaxdist doctor" in doctor["attributes"]["label"]
    assert doctor["validations"]["required"]
