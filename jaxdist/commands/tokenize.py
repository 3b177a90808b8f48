"""`jaxdist data tokenize`: the training of a tokenizer on the text of a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from jaxdist.data.text.documents import matching, python_stdlib, split_documents
from jaxdist.data.text.tokenizer import train_bpe
from jaxdist.errors import DataError
from jaxdist.types import JsonObject


def tokenize(
    out: Path,
    files: Sequence[str],
    *,
    vocab_size: int,
    heldout_fraction: float,
    console: Console,
) -> JsonObject:
    """Train a byte-level BPE on the training split, and write it as a tokenizer.json.

    Args:
      out: the file to write.
      files: the globs of text files. Without any glob, the standard library of the running Python
        is used.
      vocab_size: the number of tokens to learn.
      heldout_fraction: the run's `data.heldout_fraction`. The held-out text is not used.
      console: the console for the numbers.

    Returns:
      The size of the vocabulary and the printed numbers, by name.

    Raises:
      DataError: files cannot be read, there is no text, the size of the vocabulary does not fit, or
        `out` cannot be written.
    """
    found = matching(files) if files else python_stdlib()
    split = split_documents(
        found, heldout_fraction=heldout_fraction, not_utf8="raise" if files else "skip"
    )
    if not split.train:
        raise DataError(
            f"the {len(found)} files that match have no text to learn from, or all their text is "
            "held out: add text, or lower --heldout-fraction"
        )
    text_bytes = sum(len(document) for document in split.train)
    tokenizer = train_bpe(split.train, vocab_size, out)
    sample = split.train[0][:100_000]
    per_token = len(sample) / max(len(tokenizer.encode([sample])[0]), 1)
    console.print(
        f"{out}: {tokenizer.vocab_size:,} tokens learned from {text_bytes / 1e6:.1f} MB "
        f"in {len(split.train):,} documents, {per_token:.2f} bytes a token",
        soft_wrap=True,
    )
    return {
        "vocab_size": tokenizer.vocab_size,
        "text_bytes": text_bytes,
        "documents": len(split.train),
        "bytes_per_token": per_token,
    }
