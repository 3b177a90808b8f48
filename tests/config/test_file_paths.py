"""Paths in a config: those that no file system takes are refused with their place."""

import pytest

from jaxdist.config import Config, Document, validate
from jaxdist.config.schema import FilePath
from jaxdist.errors import ConfigError


class Place(Config):
    directory: FilePath


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("runs/a\0b", "the path contains a null character"),
        ("runs/" + "x" * 300, "a name in the path has 300 bytes; at most 255 are allowed"),
        ("é" * 128, "a name in the path has 256 bytes"),
        ("runs/" + "/".join(["x" * 200] * 25), "the path has more than 4095 bytes"),
    ],
)
def test_a_path_that_cannot_be_is_refused_with_its_place(path, words):
    with pytest.raises(ConfigError, match=rf"directory = .* \(a config from Python\): .*{words}"):
        validate(Document({"directory": path}), Place)


def test_the_longest_name_is_taken():
    assert validate(Document({"directory": "runs/" + "x" * 255}), Place).directory.name == "x" * 255
