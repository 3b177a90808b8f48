"""Local text, or the interpreter's standard library, as windows of tokens."""

from __future__ import annotations

import hashlib
import json
import logging
import platform
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import Field, model_validator

from jaxdist.config.files import replace_text
from jaxdist.config.schema import LARGEST
from jaxdist.data.cache import cache_directory, publish_folder
from jaxdist.data.source import Dataset
from jaxdist.data.text import ngram
from jaxdist.data.text.documents import TextFile, TextFilesConfig, split_documents
from jaxdist.data.text.masking import MaskedWindows, MaskingConfig
from jaxdist.data.text.packing import PackedSource
from jaxdist.data.text.tokenizer import (
    ByteTokenizer,
    ByteTokenizerConfig,
    Tokenizer,
    TokenizerConfig,
)
from jaxdist.data.text.windows import WindowSource, join_documents
from jaxdist.errors import DataError

_FORMAT = 2
_log = logging.getLogger(__name__)


class TextConfig(TextFilesConfig):
    """Text files (.txt, .md, .py, .jsonl) as windows of tokens."""

    type: Literal["text"] = "text"
    """The name that selects text data in a config."""
    jsonl_field: str = "text"
    """The key of the text in each line of a .jsonl file."""
    tokenizer: TokenizerConfig = ByteTokenizerConfig()
    """The tokenizer, which turns text into tokens, selected by its `type`."""
    window: int = Field(default=256, ge=2, le=LARGEST)
    """The number of tokens in an example, which is the context length of the model."""
    masking: MaskingConfig | None = None
    """The tokens to hide from an encoder (bert), which predicts the hidden tokens. null hides
    nothing, as decoders need."""
    packing: Literal["stream", "documents"] = "stream"
    """The content of windows. With stream, windows are consecutive parts of a single stream of all
    text. With documents, which needs masking, each window has whole documents, and a document
    longer than a window is cut. See also `model.isolate_documents`."""
    heldout_fraction: float = Field(default=0.05, ge=0, lt=1)
    """The fraction of files that are held out for evaluation, chosen by their names. 0 holds
    nothing out."""

    @model_validator(mode="after")
    def _packs_for_masking(self) -> TextConfig:
        if self.packing == "documents" and self.masking is None:
            raise ValueError(
                "data.packing: documents works only with data.masking. Without masking, each "
                "token is the target of the token before it, so the last token of a packed "
                "document would have no target. Leave data.packing out, or set data.masking: {}"
            )
        return self

    def build(self) -> Dataset:
        """Read, split and encode the text, or reuse an earlier run's encoding.

        Raises:
          DataError: the text is missing, unreadable, malformed, or too short.
        """
        tokenizer = self.tokenizer.build()
        streams = load_streams(self, self.listed(), tokenizer)
        train = self._windows(streams.train, tokenizer, f"training split of {self._name()}")
        heldout = None
        if self.heldout_fraction:
            heldout = self._windows(streams.heldout, tokenizer, "held-out split")
        dataset = Dataset(
            train=train,
            heldout=heldout,
            vocab_size=tokenizer.vocab_size,
            description=self._describe(streams.facts),
            tokenizer=tokenizer,
            baselines=partial(_baselines, streams, tokenizer.vocab_size) if heldout else dict,
        )
        return self._masked(dataset, tokenizer, self.masking) if self.masking else dataset

    def _masked(self, dataset: Dataset, tokenizer: Tokenizer, masking: MaskingConfig) -> Dataset:
        known, size = tokenizer.number(masking.token), tokenizer.vocab_size
        mask = size if known is None else known
        special = (tokenizer.end_of_document, mask)
        count = masking.predicted(self.window)
        described = f"{dataset.description}; {count} of {self.window} tokens are predicted"
        if isinstance(dataset.train, PackedSource):
            described += f", {dataset.train.padding:.2%} are padding"
        return dataset.with_sources(
            lambda source: MaskedWindows(source, masking, mask, size, special),
            vocab_size=max(size, mask + 1),
            description=described,
            baselines=dict,
        )

    def _windows(
        self, stream: np.ndarray, tokenizer: Tokenizer, what: str
    ) -> WindowSource | PackedSource:
        if len(stream) <= self.window:
            raise DataError(
                f"data: the {what} has {len(stream)} tokens, but a window needs {self.window + 1}: "
                "add text, lower data.window, or change data.heldout_fraction "
                f"({self.heldout_fraction}; 0 holds nothing out)"
            )
        kind = PackedSource if self.packing == "documents" else WindowSource
        return kind(stream, window=self.window, end_of_document=tokenizer.end_of_document)

    def _name(self) -> str:
        if self.source == "files":
            return ", ".join(self.files)
        return f"the standard library of Python {platform.python_version()}"

    def _describe(self, facts: Mapping[str, int]) -> str:
        how = "the last part of one file" if facts["files"] == 1 else "by file"
        held = f", {facts['heldout_bytes'] / 1e6:.1f} MB held out ({how})"
        return (
            f"text: {self._name()}: {facts['files']:,} files, "
            f"{facts['train_bytes'] / 1e6:.1f} MB to train on"
            + (held if self.heldout_fraction else ", nothing held out")
        )


@dataclass(frozen=True)
class Streams:
    """The tokens of both splits (uint16 or uint32 [N]), with the folder in which they are cached.

    The folder is None if the cache is not used.
    """

    train: np.ndarray
    heldout: np.ndarray
    facts: Mapping[str, int]
    folder: Path | None


def load_streams(config: TextConfig, files: Sequence[TextFile], tokenizer: Tokenizer) -> Streams:
    """Return the encoded text, from the cache if it has the text of the same inputs.

    Raises:
      DataError: a file cannot be read or decoded.
    """
    folder = cache_directory() / "tokens" / _key(config, files, tokenizer)
    cached = _read_streams(folder)
    if cached is not None:
        return cached
    streams = _encode(config, files, tokenizer)
    try:
        # A damaged cache must be deleted first, because `publish_folder` keeps an existing folder.
        shutil.rmtree(folder, ignore_errors=True)
        publish_folder(folder, partial(_write_streams, streams))
    except OSError as error:
        _log.warning(
            "the tokens are kept only in memory, because the cache %s cannot be used: %s",
            folder.parent,
            error,
        )
    # The streams are read back as memory maps, so that they do not stay in this process's memory.
    return _read_streams(folder) or streams


def _encode(config: TextConfig, files: Sequence[TextFile], tokenizer: Tokenizer) -> Streams:
    if config.source == "python-stdlib":
        not_utf8 = "skip"
    else:
        not_utf8 = "keep" if isinstance(tokenizer, ByteTokenizer) else "raise"
    split = split_documents(
        files,
        heldout_fraction=config.heldout_fraction,
        jsonl_field=config.jsonl_field,
        not_utf8=not_utf8,
    )
    train, heldout = (
        join_documents(
            tokenizer.encode(documents),
            end_of_document=tokenizer.end_of_document,
            vocab_size=tokenizer.vocab_size,
        )
        for documents in (split.train, split.heldout)
    )
    return Streams(train, heldout, split.facts, None)


def _key(config: TextConfig, files: Sequence[TextFile], tokenizer: Tokenizer) -> str:
    """Return a digest of everything that determines the token streams.

    The digest includes each file's path, name, size and modification time.
    """
    stats = [(str(file.path), file.name, file.path.stat()) for file in files]
    parts = [
        _FORMAT,
        config.source,
        tokenizer.digest,
        config.heldout_fraction,
        config.jsonl_field,
        [(path, name, stat.st_size, stat.st_mtime_ns) for path, name, stat in stats],
    ]
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()


def _write_streams(streams: Streams, folder: Path) -> None:
    np.save(folder / "train.npy", streams.train)
    np.save(folder / "heldout.npy", streams.heldout)
    (folder / "facts.json").write_text(json.dumps(dict(streams.facts)), encoding="utf-8")


def _read_streams(folder: Path) -> Streams | None:
    """Return the cached streams, or None if they are absent or damaged."""
    try:
        facts = json.loads((folder / "facts.json").read_text(encoding="utf-8"))
        train = np.load(folder / "train.npy", mmap_mode="r")
        heldout = np.load(folder / "heldout.npy", mmap_mode="r")
    except (OSError, ValueError):
        return None
    return Streams(train, heldout, facts, folder)


def _baselines(streams: Streams, vocab_size: int) -> dict[str, float]:
    """Return the held-out loss of a trigram model; the loss is cached, because it takes seconds."""
    kept = streams.folder / "trigram.json" if streams.folder else None
    if kept:
        try:
            return {"trigram": float(json.loads(kept.read_text(encoding="utf-8")))}
        except (OSError, ValueError, TypeError):
            pass
    model = ngram.TrigramModel.fit(streams.train, vocab_size)
    loss = model.loss(streams.heldout)
    if kept:
        try:
            replace_text(kept, json.dumps(loss))
        except OSError as error:
            _log.warning("the trigram loss cannot be saved in the cache: %s", error)
    return {"trigram": loss}
