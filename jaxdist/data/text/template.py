"""The chat template of a tokenizer: Jinja text that converts a conversation to a model's input."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from jaxdist.config.files import read_json, read_regular
from jaxdist.errors import DataError, os_errors_as

Message = Mapping[str, Any]
"""A message of a conversation: its `role`, such as user or assistant, and its `content`."""
CONFIG, TEMPLATE = "tokenizer_config.json", "chat_template.jinja"
ANSWERS = "assistant"
"""The role whose messages a model learns to write."""
_NAMED = ("bos_token", "eos_token", "pad_token", "unk_token")


class TextPiece(NamedTuple):
    """The text of a part of a conversation, and whether this part is an answer."""

    text: str
    answer: bool


class ChatTemplate:
    """The chat template in the folder of a tokenizer, rendered in a sandbox.

    Templates are downloaded with models. In the sandbox, a template can access only the
    conversation, and it cannot change any object.
    """

    def __init__(self, folder: Path):
        """Read chat_template.jinja, or else the template in tokenizer_config.json.

        Raises:
          DataError: the folder has no template, the template cannot be read or compiled, or jinja2
            is not installed.
        """
        try:
            from jinja2 import TemplateError, TemplateSyntaxError
            from jinja2.sandbox import ImmutableSandboxedEnvironment
        except ImportError as error:
            raise DataError(
                "data.type chat formats conversations with the tokenizer's chat template, which "
                "needs the package jinja2: pip install 'jaxdist[chat]'"
            ) from error

        def refuse(message: str) -> NoReturn:
            raise TemplateError(message)

        self._failed = TemplateError
        settings, text = _template(folder)
        self._tokens = {name: _content(settings.get(name)) for name in _NAMED}
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        # Templates rely on the settings, filters and functions that transformers provides.
        environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
        environment.globals["raise_exception"] = refuse
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            self._template = environment.from_string(text)
        except TemplateSyntaxError as error:
            raise DataError(
                f"data.tokenizer: the chat template in {folder} is malformed at line "
                f"{error.lineno}: {error}; download the file again"
            ) from error

    def render(self, messages: Sequence[Message], *, ask: bool = False) -> str:
        """Return a conversation as text; with `ask`, the text ends where an answer begins.

        Raises:
          DataError: the template refuses the conversation.
        """
        given = {"messages": [*messages], "add_generation_prompt": ask, **self._tokens}
        try:
            return self._template.render(**given)
        # Expressions in a template may raise any of the errors of Python.
        except (self._failed, TypeError, ValueError, KeyError, ArithmeticError) as error:
            raise DataError(
                f"the tokenizer's chat template rejects the conversation: {error}. Correct the "
                "conversation, or the template in the tokenizer's folder"
            ) from error

    def pieces(self, messages: Sequence[Message]) -> list[TextPiece]:
        """Return a conversation as a list of parts: answers, and the text between answers.

        An answer includes the tokens that end the answer.

        Raises:
          DataError: the template refuses the conversation, or the text of its first messages
            depends on later messages.
        """
        found, done = [], ""
        for number, message in enumerate(messages):
            if message["role"] != ANSWERS:
                continue
            asked = self.render(messages[:number], ask=True)
            whole = self.render(messages[: number + 1])
            if not (asked.startswith(done) and whole.startswith(asked)):
                raise DataError(
                    f"if later messages follow answer {number + 1}, the tokenizer's chat template "
                    "changes the text before this answer: split the conversation into rows with "
                    "one answer each"
                )
            found += [TextPiece(asked[len(done) :], False), TextPiece(whole[len(asked) :], True)]
            done = whole
        return found


def _template(folder: Path) -> tuple[Mapping[str, Any], str]:
    """Return the settings of a tokenizer, and the text of its chat template."""
    settings: Any = {}
    with os_errors_as(DataError, f"data.tokenizer: {folder} cannot be read", also=(ValueError,)):
        if (folder / CONFIG).exists():
            settings = read_json(folder / CONFIG)
        if (folder / TEMPLATE).exists():
            return settings, read_regular(folder / TEMPLATE).decode()
    text = settings.get("chat_template") if isinstance(settings, dict) else None
    if isinstance(text, list):  # A tokenizer may have several templates, each with a name.
        named = {one.get("name"): one.get("template") for one in text if isinstance(one, dict)}
        text = named.get("default")
    if not isinstance(text, str):
        raise DataError(
            f"data.tokenizer: {folder} has no chat template, neither in {TEMPLATE} nor in "
            f"{CONFIG}: use the tokenizer of a model that was trained on conversations, or "
            "write a template"
        )
    return settings, text


def _content(token: Any) -> str:
    return token.get("content", "") if isinstance(token, dict) else token or ""
