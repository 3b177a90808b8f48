"""Pieces of a long bench, each kept in a file when it is done, so that a stopped bench resumes."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jaxdist
from jaxdist.types import JsonObject

CODE = (Path(jaxdist.__file__).parent, Path(__file__).parent)


def digest() -> str:
    """Return a digest of the code; pieces that another version computed do not count."""
    found = hashlib.sha256()
    for folder in CODE:
        for path in sorted([*folder.rglob("*.py"), *folder.rglob("*.toml")]):
            found.update(path.read_bytes())
    return found.hexdigest()[:12]


def kept(
    name: str, keys: Iterable[Any], compute: Callable[[Any], JsonObject]
) -> Iterator[JsonObject]:
    """Yield the result for each key: read from an earlier run of the same code, or computed.

    Args:
      name: the name of the part of the bench.
      keys: the keys, each of which JSON can hold.
      compute: a function from a key to its result, plain data.
    """
    path = Path(tempfile.gettempdir()) / f"jaxdist_bench_prove_{digest()}_{name}.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    known = {json.dumps(key): found for key, found in map(json.loads, lines)}
    for key in keys:
        text = json.dumps(key)
        if text not in known:
            known[text] = json.loads(json.dumps(compute(key)))
            with path.open("a") as file:
                file.write(json.dumps([key, known[text]]) + "\n")
        yield known[text]
