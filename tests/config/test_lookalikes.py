"""What looks like a value of a setting but is of another type, over the whole schema."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
from pydantic import BaseModel, ValidationError

from jaxdist.config import Config, read, validate
from jaxdist.config.describe import (
    arms,
    choices,
    field_type,
    fields,
    is_mapping,
    is_model,
    is_sequence,
    split_annotation,
)
from jaxdist.errors import ConfigError
from jaxdist.experiment import ExperimentConfig
from jaxdist.parallel.zero import ZeroConfig
from jaxdist.types import Annotation, Json

LOOKALIKES: list[Json] = [
    *(True, False, 0, 1, 2, 0.0, 1.0, 2.5),
    *("", "0", "1", "1.0", "1e-3", "true", "false", "off", "no", "null"),
]
GLOBS = {("TextConfig", "files"), ("LabelledTextConfig", "files")}
"""A single glob may stand without a list."""


def models(annotation: Annotation, found: dict[type[BaseModel], None]) -> None:
    """Add the models below an annotation."""
    for arm in arms(annotation):
        bare, _ = split_annotation(arm)
        if is_model(bare):
            if bare not in found:
                found[bare] = None
                for info in fields(bare).values():
                    models(field_type(info), found)
        else:
            for inner in get_args(bare) if is_mapping(bare) or is_sequence(bare) else ():
                models(inner, found)


def kinds(annotation: Annotation) -> set[type]:
    """The types of the JSON scalars that an annotation names."""
    found: set[type] = set()
    for arm in arms(annotation):
        bare, _ = split_annotation(arm)
        listed = choices(bare)
        found |= {type(choice) for choice in listed} or {str if bare is Path else bare}
        found |= {int} if bare is float else set()
    return found


def places() -> Iterator[tuple[type[BaseModel], str, Annotation]]:
    found: dict[type[BaseModel], None] = {}
    models(ExperimentConfig, found)
    assert len(found) > 100
    for model in found:
        for key, info in fields(model).items():
            yield model, key, field_type(info)


def accepts(model: type[BaseModel], key: str, value: Json) -> bool:
    """Whether nothing is said against this value of one field."""
    try:
        model.model_validate_json(json.dumps({key: value}))
    except ValidationError as error:
        return not any(detail["loc"][:1] == (key,) for detail in error.errors())
    return True


def test_no_setting_takes_a_value_of_another_type():
    taken = []
    for model, key, annotation in places():
        if (model.__name__, key) in GLOBS:
            continue
        own = kinds(annotation)
        items = [kinds(get_args(split_annotation(arm)[0])[0]) for arm in arms(annotation)
                 if is_sequence(split_annotation(arm)[0])]  # fmt: skip
        for value in LOOKALIKES:
            if type(value) not in own and accepts(model, key, value):
                taken.append((model.__name__, key, value))
            of_items = [one for one in items if type(value) not in one]
            if of_items and len(of_items) == len(items) and accepts(model, key, [value]):
                taken.append((model.__name__, key, [value]))
    assert not taken


@pytest.mark.parametrize("value", ["true", "1.0", "'1'", "off", "null"])
def test_a_stage_is_a_whole_number_wherever_it_is_written(value: str, tmp_path: Path):
    file = tmp_path / "x.yaml"
    file.write_text(f"stage: {value}\n")
    for document in (read(file), read(None, [f"stage={value}"])):
        with pytest.raises(ConfigError, match=r"stage = .*: expected a whole number of at"):
            validate(document, ZeroConfig)


class Values(Config):
    number: float = 0.5
    count: int = 7
    switch: bool = True
    text: str | None = "x"


@pytest.mark.parametrize(
    ("written", "number", "count", "switch", "text"),
    [
        ("1e-4", 1e-4, ..., ..., ...),
        ("1E4", 1e4, ..., ..., ...),
        (".5", 0.5, ..., ..., ...),
        ("1_000", 1000.0, 1000, ..., ...),
        ("0o10", 8.0, 8, ..., ...),
        ("010", 10.0, 10, ..., ...),
        ("+1", 1.0, 1, ..., ...),
        ("1:30", ..., ..., ..., "1:30"),
        ("1e400", ..., ..., ..., ...),
        (".nan", ..., ..., ..., ...),
        ("off", ..., ..., ..., "off"),
        ("no", ..., ..., ..., "no"),
        ("y", ..., ..., ..., "y"),
        ("False", ..., ..., False, ...),
        ("'false'", ..., ..., ..., "false"),
        ("'1'", ..., ..., ..., "1"),
        ("~", ..., ..., ..., None),
        ("", ..., ..., ..., None),
    ],
)
def test_a_value_means_the_same_in_a_file_an_include_and_an_override(
    written: str, number: Json, count: Json, switch: Json, text: Json, tmp_path: Path
):
    above, file, base = tmp_path / "above.yaml", tmp_path / "x.yaml", tmp_path / "base.yaml"
    base.write_text("number: 0.25\ncount: 3\nswitch: true\ntext: base\n")
    above.write_text("include: x.yaml\n")
    wanted = {"number": number, "count": count, "switch": switch, "text": text}
    for key, value in wanted.items():
        file.write_text(f"include: base.yaml\n{key}: {written}\n")
        for document in (read(file), read(above), read(base, [f"{key}={written}"])):
            if value is ...:
                with pytest.raises(ConfigError, match=f"{key} = .*: expected"):
                    validate(document, Values)
            else:
                found = getattr(validate(document, Values), key)
                assert (found, type(found)) == (value, type(value))
