"""Tokenizers, which convert documents to numbers: raw bytes, or a trained byte-pair encoding."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, Protocol

import numpy as np
from pydantic import Field

from jaxdist.config.files import read_regular
from jaxdist.config.schema import Config, Count
from jaxdist.errors import DataError, closest, os_errors_as

if TYPE_CHECKING:
    import tokenizers

_DOCUMENTS_AT_ONCE = 1024
MAX_VOCAB = 1 << 20


class Tokenizer(Protocol):
    """A mapping from text to token numbers from 0 to vocab_size - 1."""

    vocab_size: int
    end_of_document: int
    """The token that separates documents. `encode` never returns this token."""
    digest: str
    """A digest of the tokenizer: equal digests mean equal encodings."""

    def encode(self, documents: Sequence[bytes]) -> list[np.ndarray]:
        """Encode each document to tokens, integers [N], without a separator."""
        ...

    def decode(self, tokens: Iterable[int]) -> str:
        """Decode tokens to text; a byte that is not UTF-8 becomes the replacement character."""
        ...

    def number(self, token: str) -> int | None:
        """Return the number of a special token, such as [MASK], or None if it does not exist."""
        ...


class ByteTokenizer:
    """A tokenizer without training: each byte is a token, and token 256 ends a document.

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

    def number(self, token: str) -> int | None:
        del token
        return None


class BpeTokenizer:
    """A tokenizer from a `tokenizer.json` of the tokenizers library.

    Args:
      end_of_document: the token of the file that ends a document, or None to add such a token.
      vocab_size: the number of tokens of the model, or None for the number of the file's tokens.
    """

    def __init__(
        self, file: Path, end_of_document: str | None = None, vocab_size: int | None = None
    ):
        """Load a tokenizer.json file.

        Raises:
          DataError: the file is missing or not a tokenizer, or does not have the token
            `end_of_document`, or has more tokens than the model.
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
        found = self._tokenizer.get_vocab(with_added_tokens=True)
        self.end_of_document = max(found.values(), default=-1) + 1
        if end_of_document is not None:
            if end_of_document not in found:
                near = closest(end_of_document, found)
                raise DataError(
                    f"data.tokenizer.end_of_document: {file} has no token {end_of_document!r}"
                    + (
                        f"; did you mean {near!r}?"
                        if near
                        else "; use the name of a token, or null"
                    )
                )
            self.end_of_document = found[end_of_document]
            # If a text contains the name of the token, the name is encoded as text, and does not
            # end a document.
            self._tokenizer.encode_special_tokens = True
        own_size = max(*found.values(), self.end_of_document) + 1
        self.vocab_size = vocab_size or own_size
        if self.vocab_size < own_size:
            raise DataError(
                f"data.tokenizer.vocab_size: {file} has tokens up to {own_size - 1}, which exceed "
                f"{vocab_size}: use the model's own tokenizer"
            )
        parts = content + repr((end_of_document, vocab_size)).encode()
        content = content if end_of_document is vocab_size is None else parts
        self.digest = hashlib.blake2b(content, digest_size=16).hexdigest()

    def encode(self, documents: Sequence[bytes]) -> list[np.ndarray]:
        tokens: list[np.ndarray] = []
        for start in range(0, len(documents), _DOCUMENTS_AT_ONCE):
            texts = [_decode(document) for document in documents[start:][:_DOCUMENTS_AT_ONCE]]
            encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
            tokens += [np.asarray(encoding.ids, np.uint32) for encoding in encodings]
        return tokens

    def encode_marked(self, text: str) -> np.ndarray:
        """Encode a text as int32 `[N]`.

        The name of a special token in the text becomes this token.
        """
        before = self._tokenizer.encode_special_tokens
        self._tokenizer.encode_special_tokens = False
        try:
            ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        finally:
            self._tokenizer.encode_special_tokens = before
        return np.asarray(ids, np.int32)

    def decode(self, tokens: Iterable[int]) -> str:
        # The library skips numbers that have no token.
        return self._tokenizer.decode(list(tokens))

    def number(self, token: str) -> int | None:
        return self._tokenizer.token_to_id(token)


class ByteTokenizerConfig(Config):
    """Bytes as tokens: a vocabulary of 257, which needs no training."""

    type: Literal["bytes"] = "bytes"
    """The name that selects raw bytes in a config."""

    def build(self) -> ByteTokenizer:
        return ByteTokenizer()


class BpeTokenizerConfig(Config):
    """A byte-pair encoding, or another tokenizer of the tokenizers library, from a file."""

    type: Literal["bpe"]
    """The name that selects a tokenizer of the tokenizers library in a config."""
    file: str
    """The path of the tokenizer.json; `jaxdist data tokenize` writes such a file."""
    end_of_document: str | None = None
    """The token of the file that ends a document, such as <|endoftext|>. null adds a token to the
    vocabulary."""
    vocab_size: Count | None = None
    """The number of tokens of the model, if the model has more tokens than the file. null takes the
    number in the file."""

    def build(self) -> BpeTokenizer:
        file = Path(self.file).expanduser()
        return BpeTokenizer(file, self.end_of_document, self.vocab_size)


TokenizerConfig = Annotated[ByteTokenizerConfig | BpeTokenizerConfig, Field(discriminator="type")]


def train_bpe(documents: Iterable[bytes], vocab_size: int, out: Path) -> BpeTokenizer:
    """Learn a byte-level BPE and write it to `out` as a tokenizer.json.

    Args:
      documents: the documents, in UTF-8.
      vocab_size: the number of tokens, of which 256 are the single bytes. The result has fewer
        tokens if the text is too short.
      out: the file to write.

    Raises:
      DataError: `vocab_size` is below 256 or above MAX_VOCAB, the text is not UTF-8, or the file
        cannot be written.

    Source: Sennrich, Haddow and Birch, "Neural machine translation of rare words with subword
    units", section 3.2 (2016); here the method is applied to bytes.
    """
    if vocab_size < 256:
        raise DataError(
            f"vocab_size {vocab_size} is too small: the single bytes alone are 256 tokens; "
            "use a larger number, such as 8192"
        )
    if vocab_size > MAX_VOCAB:  # The library would crash the process when it runs out of memory.
        raise DataError(
            f"vocab_size {vocab_size} is too large: at most {MAX_VOCAB} tokens are allowed"
        )
    learned = _untrained()
    from tokenizers import pre_tokenizers, trainers

    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    learned.train_from_iterator((_decode(document) for document in documents), trainer)
    with os_errors_as(DataError, f"{out} cannot be written", "choose another file"):
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(learned.to_str(pretty=True), encoding="utf-8")
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
            "UTF-8; convert the file to UTF-8, or use tokenizer: {type: bytes}"
        ) from error
