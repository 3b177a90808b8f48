"""Conversations from JSON lines as windows of tokens. Only the answers enter the loss."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence, Sized
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from pydantic import Field

from jaxdist.config.schema import LARGEST, Config
from jaxdist.data.source import ArraySource, Dataset
from jaxdist.data.text.documents import (
    hashed_share,
    json_rows,
    keys_found,
    matching,
    read_text_file,
)
from jaxdist.data.text.packing import laid_out
from jaxdist.data.text.template import ANSWERS, ChatTemplate, Message
from jaxdist.data.text.tokenizer import BpeTokenizer, BpeTokenizerConfig
from jaxdist.errors import DataError

PAIR = ("prompt", "completion")
"""The keys of a row that has an instruction and its answer instead of messages."""


class Conversation(NamedTuple):
    """The tokens of a conversation, int32 `[N]`, and whether each is in an answer, bool `[N]`."""

    tokens: np.ndarray
    answer: np.ndarray


class AnswersConfig(Config):
    """The settings of data in which the tokens of answers enter the loss."""

    files: tuple[str, ...] = Field(min_length=1)
    """The glob patterns of .jsonl files, relative to the current directory. A file has an example
    in each line."""
    tokenizer: BpeTokenizerConfig
    """The model's tokenizer, whose folder must have the chat template."""
    window: int = Field(default=512, ge=2, le=LARGEST)
    """The number of tokens in a window. A longer conversation is cut, and no conversation is
    spread over two windows."""
    heldout_fraction: float = Field(default=0.05, ge=0, lt=1)
    """The fraction of lines that are held out for evaluation, chosen by their content. 0 holds
    nothing out."""

    def rows(self) -> Iterator[tuple[str, Any]]:
        """Yield the location FILE:LINE and the value of each line of the files.

        Raises:
          DataError: a file cannot be read, or a line is not JSON.
        """
        for file in matching(self.files):
            yield from json_rows(file.path, read_text_file(file.path))

    def template(self) -> ChatTemplate:
        """Return the chat template in the folder of the tokenizer.

        Raises:
          DataError: there is no chat template.
        """
        return ChatTemplate(Path(self.tokenizer.file).expanduser().parent)

    def holds_out(self, messages: Sequence[Message]) -> bool:
        """Return whether messages are held out, which depends only on their content."""
        content = json.dumps(messages, sort_keys=True).encode()
        return hashed_share(content) < self.heldout_fraction

    def check_splits(self, splits: Sequence[Sized | None], count: int, what: str) -> None:
        """Raise a DataError if one of the splits is empty, although it should have examples.

        Args:
          splits: the training split and the held-out split.
          count: the number of lines in the files.
          what: a plural noun for the lines in the message, such as "pairs".
        """
        for kind, wanted, split in zip(
            ("train on", "hold out"), (True, self.heldout_fraction > 0), splits, strict=True
        ):
            if wanted and not split:
                raise DataError(
                    f"data: of {count} {what}, none can be used to {kind}. Add {what}, change "
                    f"data.heldout_fraction ({self.heldout_fraction}), or raise data.window "
                    f"({self.window}): each answer must begin within the window"
                )


class ChatConfig(AnswersConfig):
    """Conversations (.jsonl) as windows of tokens; only the tokens of answers enter the loss.

    A row has `messages`, a list of `{role, content}`, or the texts `prompt` and `completion`. The
    chat template of the tokenizer converts a row to text.
    """

    type: Literal["chat"]
    """The name that selects conversations in a config."""

    def build(self) -> Dataset:
        """Read the conversations, apply the chat template, encode and pack them.

        Raises:
          DataError: rows are missing, unreadable, malformed, without an answer, or too few; the
            tokenizer has no chat template.
        """
        tokenizer = self.tokenizer.build()
        template = self.template()
        splits: tuple[list[Conversation], list[Conversation]] = ([], [])
        cut = 0
        for place, row in self.rows():
            messages = _messages(row, f"data: {place}")
            found = encoded(template, tokenizer, messages, place)
            cut += len(found.tokens) > self.window + 1
            splits[self.holds_out(messages)].append(found)
        examples = [
            pack(split, window=self.window, filler=tokenizer.end_of_document) for split in splits
        ]
        self.check_splits(examples, sum(map(len, splits)), "conversations")
        train, heldout = examples
        assert train is not None
        sizes = [len(split) for split in splits]
        return Dataset(
            train=train,
            heldout=heldout,
            vocab_size=tokenizer.vocab_size,
            description=(
                f"chat: {', '.join(self.files)}: {sizes[0]:,} conversations in {len(train):,} "
                f"windows to train on, {sizes[1]:,} held out, {cut:,} cut"
            ),
            tokenizer=tokenizer,
        )


def _messages(row: Any, where: str) -> list[Message]:
    if isinstance(row, dict) and "messages" not in row and all(key in row for key in PAIR):
        roles = ("user", ANSWERS)
        named = zip(roles, (row[key] for key in PAIR), strict=True)
        row = {"messages": [{"role": role, "content": content} for role, content in named]}
    messages = row.get("messages") if isinstance(row, dict) else None
    if not isinstance(messages, list) or not all(
        isinstance(one, dict) and isinstance(one.get("role"), str) for one in messages
    ):
        raise DataError(
            f"{where} is not a conversation (found: {keys_found(row)}): give messages, a list of "
            f"{{role, content}}, or the texts {' and '.join(PAIR)}"
        )
    answers = [one.get("content") for one in messages if one["role"] == ANSWERS]
    if not answers or not all(isinstance(text, str) and text.strip() for text in answers):
        what = "an empty answer" if answers else f"no message of the role {ANSWERS}"
        raise DataError(
            f"{where} has {what}, so it has no tokens to learn from: leave the conversation out"
        )
    return messages


def encoded(
    template: ChatTemplate, tokenizer: BpeTokenizer, messages: Sequence[Message], place: str
) -> Conversation:
    """Encode a conversation part by part, so that no token crosses the start or end of an answer.

    Args:
      place: the location of the conversation, for errors.

    Raises:
      DataError: the template refuses the conversation.
    """
    try:
        pieces = template.pieces(messages)
    except DataError as error:
        raise DataError(f"data: {place}: {error}") from error
    tokens = [tokenizer.encode_marked(piece.text) for piece in pieces]
    answer = [np.full(len(t), p.answer) for t, p in zip(tokens, pieces, strict=True)]
    return Conversation(np.concatenate(tokens), np.concatenate(answer))


def pack(conversations: Sequence[Conversation], *, window: int, filler: int) -> ArraySource | None:
    """Pack conversations in order into windows, or return None if no window has an answer.

    A conversation that is longer than a window is cut, and is left out if no answer remains.
    `tokens` is int32 [N, L + 1]. `segments`, int32 [N, L], has for each input the number of its
    conversation in the window, counted from 1, or 0 for filler. `answer`, float32 [N, L], is 1 if
    the target is a token of an answer, and otherwise 0.

    Args:
      window: the number of inputs in a window, L.
      filler: the token that fills up a window.

    >>> made = pack([Conversation(np.arange(3), np.array([0, 0, 1], bool))], window=4, filler=9)
    >>> {name: rows.tolist() for name, rows in made.take(np.array([0])).items()}
    ... # doctest: +NORMALIZE_WHITESPACE
    {'tokens': [[0, 1, 2, 9, 9]], 'segments': [[1, 1, 1, 0]],
     'answer': [[0.0, 1.0, 0.0, 0.0]]}
    """
    windows: list[list[Conversation]] = []
    left = 0
    for one in conversations:
        own = Conversation(one.tokens[: window + 1], one.answer[: window + 1])
        if not own.answer[1:].any():
            continue
        if not windows or len(own.tokens) > left:
            windows.append([])
            left = window + 1
        windows[-1].append(own)
        left -= len(own.tokens)
    if not windows:
        return None
    tokens, segments = laid_out(
        [[one.tokens for one in held] for held in windows], window + 1, filler
    )
    # The first token of a conversation is not predicted from the conversation, so it has no weight.
    answers = [[one.answer & (np.arange(len(one.answer)) > 0) for one in held] for held in windows]
    weights = laid_out(answers, window + 1, 0)[0][:, 1:].astype(np.float32)
    return ArraySource(tokens=tokens, segments=segments[:, :-1], answer=weights)
