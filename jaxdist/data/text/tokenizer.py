"""Tokenizers between documents and token numbers: raw bytes, or a trained byte-pair encoding."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, Protocol

import numpy as np
from pydantic import Field

from jaxdist.config.files import read_regular
from jaxdist.config.schema import Config
from jaxdist.errors import DataError, closest

if TYPE_CHECKING:
    import tokenizers

_DOCUMENTS_AT_ONCE = 1024
MAX_VOCAB = 1 << 20


class Tokenizer(Protocol):
    """A mapping from text to numbers in [0, vocab_size)."""

    vocab_size: int
    end_of_document: int
    """The token that separates documents; `encode` never returns it."""
    digest: str
    """A digest of the tokenizer: equal digests mean equal encodings."""

    def encode(self, documents: Sequence[bytes]) -> list[np.ndarray]:
        """Encode each document to tokens (integers [N]), without the separator."""
        ...

    def decode(self, tokens: Iterable[int]) -> str:
        """Decode tokens to text; bytes that are not UTF-8 become the replacement character."""
        ...


class ByteTokenizer:
    """A tokenizer in which a byte is its own token, and 256 ends a document; it needs no training.

    >>> tokenizer = ByteTokenizer()
    >>> tokenizer.encode([b"hi"])
    [array([104, 105], dtype=uint8)]
    >>> tokenizer.decode([104, 105, 256])
    'hi'
    """

    vocab_size = 257
    end_of_document = 256
    digest = "bytes"

    def encode(self, documents: Sequence[bytes]) -> list[np.ndarray]:
        return [np.frombuffer(document, np.uint8) for document in documents]

    def decode(self, tokens: Iterable[int]) -> str:
        return bytes(token for token in tokens if token < 256).decode(errors="replace")


class BpeTokenizer:
    """A `tokenizer.json` of the tokenizers library, with a further token that ends a document."""

    def __init__(self, file: Path):
        """Load the file.

        Raises:
          DataError: the file is missing or not a tokenizer.
        """
        import tokenizers

        try:
            content = read_regular(file)
            self._tokenizer = tokenizers.Tokenizer.from_buffer(content)
        except OSError as error:
            siblings = [path.name for path in file.parent.glob("*")]
            match = closest(file.name, siblings)
            raise DataError(
                f"data.tokenizer.file: {file} cannot be read: {error.strerror}"
                + (f"; did you mean {match}?" if match else "")
            ) from error
        except Exception as error:  # The library raises a bare Exception for a malformed file.
            raise DataError(
                f"data.tokenizer.file: {file} is not a tokenizer.json: {error}; train one with "
                "`jaxdist data tokenize`"
            ) from error
        self.end_of_document = self._tokenizer.get_vocab_size(with_added_tokens=True)
        self.vocab_size = self.end_of_document + 1
        self.digest = hashlib.blake2b(content, digest_size=16).hexdigest()

    def encode(self, documents: Sequence[bytes]) -> list[np.ndarray]:
        tokens: list[np.ndarray] = []
        for start in range(0, len(documents), _DOCUMENTS_AT_ONCE):
            texts = [_decode(document) for document in documents[start:][:_DOCUMENTS_AT_ONCE]]
            encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
            tokens += [np.asarray(encoding.ids, np.uint32) for encoding in encodings]
        return tokens

    def decode(self, tokens: Iterable[int]) -> str:
        return self._tokenizer.decode(list(tokens))  # skips numbers it does not know


class ByteTokenizerConfig(Config):
    """Bytes as tokens: a vocabulary of 257, which needs no training."""

    type: Literal["bytes"] = "bytes"
    """Raw bytes."""

    def build(self) -> ByteTokenizer:
        return ByteTokenizer()


class BpeTokenizerConfig(Config):
    """A byte-pair encoding from a file."""

    type: Literal["bpe"]
    """A tokenizer of the tokenizers library."""
    file: str
    """Path of the tokenizer.json; `jaxdist data tokenize` writes such a file."""

    def build(self) -> BpeTokenizer:
        return BpeTokenizer(Path(self.file).expanduser())


TokenizerConfig = Annotated[ByteTokenizerConfig | BpeTokenizerConfig, Field(discriminator="type")]


def train_bpe(documents: Iterable[bytes], vocab_size: int, out: Path) -> BpeTokenizer:
    """Learn a byte-level BPE and write it to `out` as a tokenizer.json.

    Args:
      documents: UTF-8 text.
      vocab_size: number of tokens to learn, at least the 256 bytes; little text gives fewer.
      out: the file to write.

    Raises:
      DataError: fewer than 256 tokens or more than MAX_VOCAB, text that is not UTF-8, or a file
        that cannot be written.

    Source: Sennrich, Haddow and Birch, "Neural machine translation of rare words with subword
    units", section 3.2 (2016), on bytes.
    """
    if vocab_size < 256:
        raise DataError(f"vocab_size {vocab_size} is too small: 256 bytes are tokens already")
    if vocab_size > MAX_VOCAB:  # the library would crash the process when it runs out of memory
        raise DataError(f"vocab_size {vocab_size} is too large: at most {MAX_VOCAB}")
    learned = _untrained()
    from tokenizers import pre_tokenizers, trainers

    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    learned.train_from_iterator((_decode(document) for document in documents), trainer)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(learned.to_str(pretty=True), encoding="utf-8")
    except OSError as error:
        raise DataError(f"{out} cannot be written: {error.strerror}; name another file") from error
    return BpeTokenizer(out)


def _untrained() -> tokenizers.Tokenizer:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.BPE())
    # The stubs do not declare these properties' setters.
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _decode(document: bytes) -> str:
    try:
        return document.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"data: byte {error.start} of a document that begins with {document[:40]!r} is not "
            "UTF-8; convert it, or use tokenizer: {type: bytes}"
        ) from error
