"""Pairs of a preferred and a rejected answer in JSON lines, for `loss.type: dpo`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from jaxdist.data.source import ArraySource, Dataset, Example
from jaxdist.data.text.chat import AnswersConfig, Conversation, encoded, pack
from jaxdist.data.text.documents import keys_found
from jaxdist.data.text.template import ANSWERS, Message
from jaxdist.errors import DataError

KINDS = ("chosen", "rejected")


class Pair(NamedTuple):
    """Two conversations that differ only in their last message, which is an answer."""

    chosen: list[Message]
    rejected: list[Message]


class PreferencesConfig(AnswersConfig):
    """Pairs of answers (.jsonl): an example is a pair, the preferred answer first.

    A row has `chosen` and `rejected`, as texts or as lists of `{role, content}`, and `prompt`, a
    text or such a list. The lists may instead begin with the prompt. The chat template of the
    tokenizer converts both conversations to text. Only the tokens of the last answer enter the
    loss.
    """

    type: Literal["preferences"]
    """The name that selects pairs of answers in a config."""

    def build(self) -> Dataset:
        """Read the pairs, apply the chat template, and encode them.

        Raises:
          DataError: rows are missing, unreadable, malformed or too few; the tokenizer has no chat
            template.
        """
        tokenizer = self.tokenizer.build()
        template = self.template()
        splits: tuple[list[Example], list[Example]] = ([], [])
        count = 0
        for place, row in self.rows():
            pair = _pair(row, f"data: {place}")
            packed = [
                pack([_last(encoded(template, tokenizer, one, place))], window=self.window,
                     filler=tokenizer.end_of_document)
                for one in pair
            ]  # fmt: skip
            both = [one[0] for one in packed if one is not None]
            count += 1
            # If the window cuts off an answer, the pair has nothing to compare.
            if len(both) == len(KINDS):
                split = splits[self.holds_out([*pair.chosen, *pair.rejected])]
                split.append(_stacked(both))
        held = sum(map(len, splits))
        self.check_splits(splits, count, "pairs")
        train, heldout = splits
        return Dataset(
            train=ArraySource(**_stacked(train)),
            heldout=ArraySource(**_stacked(heldout)) if heldout else None,
            vocab_size=tokenizer.vocab_size,
            description=(
                f"preferences: {', '.join(self.files)}: {len(train):,} pairs to train on, "
                f"{len(heldout):,} held out, {count - held:,} whose answers the window cuts off"
            ),
            tokenizer=tokenizer,
        )


def _pair(row: Any, where: str) -> Pair:
    if not isinstance(row, dict) or any(kind not in row for kind in KINDS):
        raise DataError(
            f"{where} is not a pair of answers (found: {keys_found(row)}): give "
            f"{' and '.join(KINDS)}, each as a text or as a list of {{role, content}}, and a prompt"
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
