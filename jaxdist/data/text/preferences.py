"""Pairs of a preferred and a rejected answer in JSON lines, for `loss.type: dpo`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from pydantic import Field

from jaxdist.config.schema import LARGEST, Config
from jaxdist.data.source import ArraySource, Dataset, Example
from jaxdist.data.text.chat import Conversation, encoded, is_heldout, pack
from jaxdist.data.text.documents import matching, read_text_file
from jaxdist.data.text.template import ANSWERS, ChatTemplate, Message
from jaxdist.data.text.tokenizer import BpeTokenizerConfig
from jaxdist.errors import DataError

KINDS = ("chosen", "rejected")


class Pair(NamedTuple):
    """Two conversations that differ only in their last message, which is an answer."""

    chosen: list[Message]
    rejected: list[Message]


class PreferencesConfig(Config):
    """Pairs of answers (.jsonl): an example is a pair, the preferred answer first.

    A row has `chosen` and `rejected`, as texts or as lists of `{role, content}`, and `prompt`, a
    text or such a list. The lists may instead begin with the prompt. The chat template of the
    tokenizer converts both conversations to text. Only the tokens of the last answer enter the
    loss.
    """

    type: Literal["preferences"]
    """The name that selects pairs of answers in a config."""
    files: tuple[str, ...] = Field(min_length=1)
    """The glob patterns of .jsonl files, relative to the current directory. A file has a pair of
    answers in each line."""
    tokenizer: BpeTokenizerConfig
    """The model's tokenizer, whose folder must have the chat template."""
    window: int = Field(default=512, ge=2, le=LARGEST)
    """The number of tokens of each conversation of a pair; longer conversations are cut."""
    heldout_fraction: float = Field(default=0.05, ge=0, lt=1)
    """The fraction of pairs that are held out for evaluation, chosen by their content. 0 holds
    nothing out."""

    def build(self) -> Dataset:
        """Read the pairs, apply the chat template, and encode them.

        Raises:
          DataError: rows are missing, unreadable, malformed or too few; the tokenizer has no chat
            template.
        """
        tokenizer = self.tokenizer.build()
        template = ChatTemplate(Path(self.tokenizer.file).expanduser().parent)
        splits: tuple[list[Example], list[Example]] = ([], [])
        count = 0
        for place, pair in read_pairs(self.files):
            packed = [
                pack([_last(encoded(template, tokenizer, one, place))], window=self.window,
                     filler=tokenizer.end_of_document)
                for one in pair
            ]  # fmt: skip
            both = [one[0] for one in packed if one is not None]
            count += 1
            # If the window cuts off an answer, the pair has nothing to compare.
            if len(both) == len(KINDS):
                split = splits[is_heldout([*pair.chosen, *pair.rejected], self.heldout_fraction)]
                split.append(_stacked(both))
        held = sum(map(len, splits))
        for kind, wanted, split in zip(
            ("train on", "hold out"), (True, self.heldout_fraction > 0), splits, strict=True
        ):
            if wanted and not split:
                raise DataError(
                    f"data: of {count} pairs, none can be used to {kind}. Add pairs, change "
                    f"data.heldout_fraction ({self.heldout_fraction}), or raise data.window "
                    f"({self.window}): both answers must begin within the window"
                )
        train, heldout = splits
        return Dataset(
            train=ArraySource(**_stacked(train)),
            heldout=ArraySource(**_stacked(heldout)) if heldout else None,
            vocab_size=tokenizer.vocab_size,
            classes=None,
            description=(
                f"preferences: {', '.join(self.files)}: {len(train):,} pairs to train on, "
                f"{len(heldout):,} held out, {count - held:,} whose answers the window cuts off"
            ),
            facts={"pairs": count, "left_out_pairs": count - held},
            tokenizer=tokenizer,
        )


def read_pairs(files: Sequence[str]) -> Iterator[tuple[str, Pair]]:
    """Yield each pair of the files, with its location FILE:LINE for error messages.

    Raises:
      DataError: a file cannot be read, or a line is not JSON or not a pair of answers.
    """
    for file in matching(files):
        for number, line in enumerate(read_text_file(file.path).splitlines(), 1):
            if line.strip():
                yield f"{file.path}:{number}", _pair(line, f"data: {file.path}:{number}")


def _pair(line: bytes, where: str) -> Pair:
    try:
        row: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} is not JSON: {error}") from error
    if not isinstance(row, dict) or any(kind not in row for kind in KINDS):
        keys = sorted(row) if isinstance(row, dict) else type(row).__name__
        raise DataError(
            f"{where} is not a pair of answers (found: {keys}): give {' and '.join(KINDS)}, "
            "each as a text or as a list of {role, content}, and a prompt"
        )
    before = _messages(row.get("prompt", []), "user", f"{where}: prompt")
    pair = Pair(*([*before, *_messages(row[k], ANSWERS, f"{where}: {k}")] for k in KINDS))
    for kind, messages in zip(KINDS, pair, strict=True):
        if len(messages) < 2 or messages[-1]["role"] != ANSWERS:
            what = "no message before its answer" if len(messages) < 2 else "no answer at its end"
            raise DataError(
                f"{where}: {kind} has {what}: a pair is a prompt, and two messages of the role "
                f"{ANSWERS} that follow the prompt. Correct the pair, or leave it out"
            )
    if pair.chosen[:-1] != pair.rejected[:-1] or pair.chosen == pair.rejected:
        alike = pair.chosen == pair.rejected
        what = "are alike" if alike else "answer different prompts"
        raise DataError(
            f"{where}: {' and '.join(KINDS)} {what}, so neither answer can be preferred: leave the "
            "pair out"
        )
    return pair


def _messages(given: Any, role: str, where: str) -> list[Message]:
    """Return a list of messages; a text becomes a single message of the role `role`."""
    messages: Any = [{"role": role, "content": given}] if isinstance(given, str) else given
    if not isinstance(messages, list) or not all(
        isinstance(one, dict)
        and isinstance(one.get("role"), str)
        and isinstance(one.get("content"), str)
        and one["content"].strip()
        for one in messages
    ):
        raise DataError(
            f"{where} is neither a text nor a list of {{role, content}}, or a text in it is empty: "
            "correct the row, or leave it out"
        )
    return messages


def _last(one: Conversation) -> Conversation:
    """Return the conversation with only its last answer marked as an answer."""
    begins = np.flatnonzero(np.diff(one.answer.astype(np.int8)) == 1) + 1
    start = begins[-1] if len(begins) else 0
    return one._replace(answer=one.answer & (np.arange(len(one.answer)) >= start))


def _stacked(rows: Sequence[Example]) -> Example:
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}
