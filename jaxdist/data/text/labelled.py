"""Labelled documents as sequences of tokens, each with the class of its document."""

from __future__ import annotations

import fnmatch
import hashlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import numpy as np
from pydantic import Field, model_validator

from jaxdist.config.schema import LARGEST, Count
from jaxdist.data.source import ArraySource, Dataset
from jaxdist.data.text.documents import (
    TextFile,
    TextFilesConfig,
    hashed_share,
    is_usable,
    json_rows,
    keys_found,
    read_text_file,
)
from jaxdist.data.text.packing import laid_out
from jaxdist.data.text.tokenizer import ByteTokenizerConfig, Tokenizer, TokenizerConfig
from jaxdist.errors import DataError

FIRST = ("[CLS]", "<s>")
"""The candidates for the first token of a sequence. The first candidate that the tokenizer has is
used."""


class LabelledDocument(NamedTuple):
    """A document, its class, and a key whose hash decides whether the document is held out."""

    content: bytes
    label: str
    key: bytes


class LabelledTextConfig(TextFilesConfig):
    """Labelled text as sequences of tokens: rows of .jsonl files, or files that have a class."""

    type: Literal["labelled_text"]
    """The name that selects labelled text in a config."""
    text_field: str = "text"
    """The key of the text in each line of a .jsonl file."""
    label_field: str = "label"
    """The key of the class, which is a text or a number, in each line of a .jsonl file."""
    classes: dict[str, Annotated[list[str], Field(min_length=1)]] | None = None
    """The patterns of file names for each class, for files that are not .jsonl. The first pattern
    that matches a name determines the class. null takes the name of a file's folder."""
    tokenizer: TokenizerConfig = ByteTokenizerConfig()
    """The tokenizer, which turns text into tokens, selected by its `type`."""
    window: int = Field(default=128, ge=2, le=LARGEST)
    """The number of tokens in an example; shorter documents are padded."""
    pieces: Count | None = None
    """The number of windows, from the start of each document, that become examples. null takes all
    windows."""
    heldout_fraction: float = Field(default=0.1, gt=0, lt=1)
    """The fraction of documents that are held out for evaluation, chosen by the names of files and
    by the contents of rows."""

    @model_validator(mode="after")
    def _check(self) -> LabelledTextConfig:
        if self.source == "python-stdlib" and not self.classes:
            raise ValueError(
                "source python-stdlib needs data.classes, such as {tests: [test/*], library: ['*']}"
            )
        return self

    def build(self) -> Dataset:
        """Read, label, encode and split the documents.

        An example has `tokens` int32 [L], `segments` int32 [L], and `label` int32. The segments are
        1 for the tokens of the document, and 0 for padding.

        Raises:
          DataError: text is missing, unreadable or malformed; a document has no class; there are
            fewer than two classes; a split lacks a class.
        """
        tokenizer = self.tokenizer.build()
        splits: tuple[list[LabelledDocument], ...] = ([], [])
        for document in self._documents():
            splits[hashed_share(document.key) < self.heldout_fraction].append(document)
        counts = [Counter(document.label for document in split) for split in splits]
        names = sorted({*counts[0], *counts[1]})
        _check_classes(names, counts, self.heldout_fraction)
        train, heldout = (self._examples(split, names, tokenizer) for split in splits)
        labels = heldout.take(np.arange(len(heldout)))["label"]
        most = np.bincount(labels).max() / len(labels)
        where = ", ".join(self.files) or "Python's standard library"
        return Dataset(
            train=train,
            heldout=heldout,
            vocab_size=tokenizer.vocab_size,
            classes=len(names),
            description=(
                f"labelled text: {where}: {len(splits[0]):,} documents to train on, "
                f"{len(splits[1]):,} held out, of the classes {', '.join(names)}; the most "
                f"frequent has {most:.1%} of the held-out examples"
            ),
            tokenizer=tokenizer,
        )

    def _documents(self) -> list[LabelledDocument]:
        found: dict[bytes, LabelledDocument] = {}
        for file in self.listed():
            content = read_text_file(file.path)
            if file.path.suffix == ".jsonl":
                rows = self._rows(file.path, content)
            elif self.source == "python-stdlib" and not is_usable(file.path, content, "skip"):
                continue  # The standard library has a few files that are not UTF-8, for its tests.
            else:
                rows = [LabelledDocument(content, self._class_of(file), file.name.encode())]
            for row in rows:
                # Documents with equal content count once, because copies could be in both splits.
                if row.content.strip():
                    found.setdefault(hashlib.blake2b(row.content).digest(), row)
        return [*found.values()]

    def _rows(self, path: Path, content: bytes) -> list[LabelledDocument]:
        rows = []
        for place, row in json_rows(path, content):
            text = row.get(self.text_field) if isinstance(row, dict) else None
            label = row.get(self.label_field) if isinstance(row, dict) else None
            if not isinstance(text, str) or isinstance(label, bool | float) or label in (None, ""):
                raise DataError(
                    f"data: {place} needs a text in {self.text_field!r} and a class (a text or a "
                    f"whole number) in {self.label_field!r} (found: {keys_found(row)}): name the "
                    "keys with data.text_field and data.label_field"
                )
            encoded = text.encode(errors="replace")
            rows.append(LabelledDocument(encoded, str(label), encoded))
        return rows

    def _class_of(self, file: TextFile) -> str:
        if self.classes is None:
            return file.path.resolve().parent.name
        for name, patterns in self.classes.items():
            if any(fnmatch.fnmatchcase(file.name, pattern) for pattern in patterns):
                return name
        raise DataError(
            f"data.classes: no pattern matches {file.name}: add a pattern, such as "
            "{other: ['*']} at the end"
        )

    def _examples(
        self, split: Sequence[LabelledDocument], names: Sequence[str], tokenizer: Tokenizer
    ) -> ArraySource:
        known = (tokenizer.number(name) for name in FIRST)
        end = tokenizer.end_of_document
        first = next((number for number in known if number is not None), end)
        room = self.window - 1
        encoded = tokenizer.encode([document.content for document in split])
        rows = [
            (tokens[start : start + room], names.index(document.label))
            for document, tokens in zip(split, encoded, strict=True)
            for start in range(0, len(tokens), room)[: self.pieces]
        ]
        pieces = [[np.concatenate([[first], piece])] for piece, _ in rows]
        tokens, segments = laid_out(pieces, self.window, end)
        label = np.array([label for _, label in rows], np.int32)
        return ArraySource(tokens=tokens, segments=segments, label=label)


def _check_classes(names: Sequence[str], counts: Sequence[Counter[str]], fraction: float) -> None:
    if len(names) < 2:
        raise DataError(
            f"data: the documents have the classes {list(names)}, but a classifier needs two "
            "classes or more: change data.classes or data.label_field"
        )
    for split, own in zip(("training", "held-out"), counts, strict=True):
        absent = [name for name in names if not own[name]]
        if absent:
            raise DataError(
                f"data: the {split} split has no document of the class {', '.join(absent)}: add "
                f"documents, or change data.heldout_fraction ({fraction})"
            )
