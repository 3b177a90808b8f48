"""Every key of the configuration that a message or a guide names is one that a user can set."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, get_args

import pytest

from jaxdist.config.describe import (
    arms,
    field_type,
    fields,
    is_mapping,
    is_model,
    is_sequence,
    split_annotation,
)
from jaxdist.errors import ConfigError
from jaxdist.experiment import ExperimentConfig, load
from jaxdist.launch.build import ENGINES
from jaxdist.types import Annotation

ROOT = Path(__file__).parents[2]
Keys = tuple[str, ...]
DOTTED = re.compile(r"(?<![\w./:-])([a-z_]+(?:\.[a-z_0-9]+)+)(?![\w(/])")
OTHERS = {
    "data.dcn": "an axis over two networks, which is a value",
    "costs.forward": "a schedule's own setting",
    "costs.backward_input": "a schedule's own setting",
    "mesh.tensr": "the example of a mistake",
    "checkpoint.interval": "torchtitan's",
    "metrics.enable_wandb": "torchtitan's",
    "variant.name": "an attribute of a row",
    "run.stop": "what a hook calls",
    "server.arrived": "an attribute of a sum in secret",
    "optimizer.type": "DeepSpeed's",
}
FILES = (
    ".md", ".py", ".json", ".jsonl", ".png", ".npy", ".npz", ".lock", ".yaml", ".bin", ".gguf",
    ".safetensors", ".model",
)  # fmt: skip
FOREIGN = "jaxdist/interchange"
"""The folder whose names are mostly those of tensors and keys in other frameworks' files."""


def collect(annotation: Annotation, at: Keys, settings: set[Keys], free: set[Keys]) -> None:
    """Add the paths below an annotation, and those below which any key may stand."""
    for arm in arms(annotation):
        bare, _ = split_annotation(arm)
        if is_model(bare):
            for key, info in fields(bare).items():
                settings.add((*at, key))
                collect(field_type(info), (*at, key), settings, free)
        elif is_mapping(bare):
            free.add(at)
        elif is_sequence(bare):
            for inner in get_args(bare):
                if inner is not Ellipsis:
                    collect(inner, at, settings, free)


class Known(NamedTuple):
    """The paths of settings, those below which any key may stand, and the keys of the former."""

    settings: set[Keys]
    free: set[Keys]
    names: set[str]


@pytest.fixture(scope="module")
def known() -> Known:
    settings: set[Keys] = set()
    free: set[Keys] = set()
    collect(ExperimentConfig, (), settings, free)
    assert ("optim", "schedule", "warmup_steps") in settings
    assert ("sharding", "rules") in free
    names = {key for path in settings for key in path}
    for engine in ENGINES.values():  # their settings, such as servers.cpus, may be named too
        collect(engine, (), settings, free)
    return Known(settings, free, names)


def texts(file: Path) -> Iterator[tuple[int, str]]:
    """The texts of a module that may be said to a user: all but docstrings and names of modules."""
    nodes = [*ast.walk(ast.parse(file.read_text()))]
    said = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    pieces = [node for node in nodes if isinstance(node, ast.JoinedStr)]
    said |= {id(piece) for node in pieces for piece in node.values}
    for node in nodes:
        if id(node) in said:
            continue
        if isinstance(node, ast.JoinedStr):
            parts = [str(p.value) if isinstance(p, ast.Constant) else "{}" for p in node.values]
            yield node.lineno, "".join(parts)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def unknown(text: str, known: Known) -> list[str]:
    """Dotted words of a text that begin as a key does and are none."""
    settings, free, names = known
    found = []
    for word in DOTTED.findall(text):
        path = tuple(word.split("."))
        open_ended = any(path[:length] in free for length in range(len(path)))
        if path[0] in names and path not in settings and not open_ended:
            found.append(word)
    return [word for word in found if word not in OTHERS and not word.endswith(FILES)]


@pytest.mark.full
def test_what_messages_name_can_be_set(known: Known):
    wrong = []
    for file in sorted((ROOT / "jaxdist").rglob("*.py")):
        if file == ROOT / "jaxdist/__init__.py" or FOREIGN in str(file):  # names of other things
            continue
        for line, text in texts(file):
            where = f"{file.relative_to(ROOT)}:{line}"
            wrong += [f"{where}: {word}" for word in unknown(text, known) if word != "xla.sdy"]
    assert not wrong


def test_what_guides_name_can_be_set(known: Known):
    wrong = []
    for file in [*(ROOT / "docs").glob("*.md"), *(ROOT / "docs/guides").glob("*.md")]:
        wrong += [f"{file.name}: {word}" for word in unknown(file.read_text(), known)]
    assert not wrong


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("set schedule.warmup_steps", ["schedule.warmup_steps"]),
        ("set optim.warmup_steps or optim.schedule.warmup_steps", ["optim.warmup_steps"]),
        ("set sharding.rules.batch, see mesh.md", []),
    ],
)
def test_a_key_that_cannot_be_set_is_found(text: str, found: list[str], known: Known):
    assert unknown(text, known) == found


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("optim.warmup_steps=4", "'optim.schedule.warmup_steps'? (allowed: type, learning_rate, "),
        ("warmup_steps=4", "'optim.schedule.warmup_steps' or 'parallel.compression.warmup_steps'?"),
        ("zero.stage=1", "'parallel.zero'? (allowed: model, data"),
        ("steps=4", "'train.steps'? (allowed: model, data"),
        ("step=4", "'train.steps'? (allowed: model, data"),
        ("optim.learnig_rate=1", "'learning_rate'? (allowed: type, learning_rate, "),
        ("mesh.heldout_fraction=0", "'data.heldout_fraction'? (allowed: data, stage"),
    ],
)
def test_a_key_in_the_wrong_section_is_told_its_place(override: str, hint: str):
    with pytest.raises(ConfigError) as caught:
        load(ROOT / "configs/gpt/quickstart.yaml", [override])
    assert f"unknown key; did you mean {hint}" in str(caught.value)


def test_a_key_of_nowhere_is_told_what_is_allowed():
    with pytest.raises(ConfigError, match=r"zzzz = 1 .*: unknown key; allowed: model"):
        load(ROOT / "configs/gpt/quickstart.yaml", ["zzzz=1"])
