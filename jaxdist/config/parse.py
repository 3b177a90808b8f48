"""The parser of YAML 1.2, which makes a tree of plain data with line numbers, within size limits.

The parser reads the events of ruamel and does not use ruamel's constructors. Therefore tags have no
effect, aliases are counted before they are followed, and each key keeps its line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError
from ruamel.yaml.events import (
    AliasEvent,
    DocumentStartEvent,
    Event,
    MappingEndEvent,
    MappingStartEvent,
    NodeEvent,
    ScalarEvent,
    SequenceEndEvent,
)
from ruamel.yaml.nodes import ScalarNode

from jaxdist.config.document import Node, Origin
from jaxdist.errors import ConfigError
from jaxdist.types import Json

MAX_BYTES = 1 << 16
MAX_DEPTH = 32
MAX_VALUES = 10_000
MAX_DIGITS = 80
MOST_PROBLEMS = 50
"""The largest number of problems of a config that an error message lists."""

Locate = Callable[[int], Origin]

# This parser only resolves scalars. It never parses a file, since a %YAML line in the file would
# change the version of YAML for all later scalars.
_SCALARS = YAML(typ="safe", pure=True)


def parse_yaml(text: str, locate: Locate) -> Node:
    """Return the tree of the only document in a text; empty text is null.

    Args:
      text: the YAML 1.2, in which `1e-3` is a number and `on` is text; a date such as `2024-01-31`
        stays text.
      locate: the function from the number of a line, counted from 1, to an origin.

    Raises:
      ConfigError: the text is not YAML, or has a tag, a directive, a second document, or a key that
        is not text or occurs twice. The error is also raised for more than MAX_BYTES characters,
        MAX_DEPTH levels, MAX_VALUES values or MAX_DIGITS digits.

    >>> parse_yaml("{lr: 1e-3, on: [true, 0x10]}", lambda line: Origin("x.yaml", line)).plain()
    {'lr': 0.001, 'on': [True, 16]}
    """
    # This limit is checked first, because the other limits are checked during the parse, which
    # processes 0.1 MB per second.
    if len(text) > MAX_BYTES:
        raise ConfigError(
            f"{locate(1)}: the config is longer than {MAX_BYTES} characters; write a smaller config"
        )
    builder = _Builder(text, locate)
    try:
        return builder.build()
    except YAMLError as error:
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        what = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error)
        where = locate(mark.line + 1 if mark else 1)
        raise ConfigError(f"{where}: not valid YAML: {what}{_hint(what)}") from None
    except ConfigError:
        raise
    except (OverflowError, ValueError):
        # ruamel calls chr() with the number of a \U escape; chr() raises these errors if the number
        # is too large.
        raise ConfigError(f"{locate(1)}: not valid YAML: a \\U escape beyond 10FFFF") from None


def plain_scalar(text: str) -> Json:
    """Return the value of a text as an unquoted YAML scalar.

    >>> [plain_scalar(text) for text in ("on", "1e-3", "1_000", "~", "2024-01-31")]
    ['on', 0.001, 1000, None, '2024-01-31']
    """
    tag = str(_SCALARS.resolver.resolve(ScalarNode, text, (True, False))).rpartition(":")[2]
    node = ScalarNode(tag, text)
    try:
        if tag == "null":
            return None
        if tag == "bool":
            return _SCALARS.constructor.construct_yaml_bool(node)
        if tag == "int":
            return _SCALARS.constructor.construct_yaml_int(node)
        if tag == "float":
            return _SCALARS.constructor.construct_yaml_float(node)
    except ValueError:  # ruamel's pattern accepts a few texts that are not numbers, such as "-_".
        return text
    return text


def _hint(problem: str) -> str:
    if "'\\t'" in problem:
        return "; indent with spaces, not tabs"
    if "cannot start any token" in problem or "mapping values are not allowed" in problem:
        return "; put quotes around the value if it is text"
    return ""


def _size_and_depth(node: Node) -> tuple[int, int]:
    if isinstance(node.value, dict | list):
        children = node.value.values() if isinstance(node.value, dict) else node.value
        measured = [_size_and_depth(child) for child in children]
        return 1 + sum(size for size, _ in measured), 1 + max((d for _, d in measured), default=0)
    return 1, 1


class _Builder:
    def __init__(self, text: str, locate: Locate):
        self.text = text
        self.locate = locate
        self.events: Iterator[Event] = iter(())
        self.anchors: dict[str, Node] = {}
        self.values = 0
        self.problems: list[str] = []

    def build(self) -> Node:
        self.events = iter(YAML(typ="safe", pure=True).parse(self.text))
        root = Node(None, self.locate(1))
        documents = 0
        for event in self.events:
            if isinstance(event, DocumentStartEvent):
                documents += 1
                self._check_document(event, documents)
            elif isinstance(event, NodeEvent):
                root = self._node(event, 1)
        if self.problems:
            raise ConfigError("\n".join(self.problems))
        return root

    def _check_document(self, event: DocumentStartEvent, documents: int) -> None:
        if documents > 1:
            raise self._error(
                event,
                "a second YAML document ('---') begins here; write a single document in each file",
            )
        if event.version or event.tags:
            raise self._error(event, "directives ('%...') are not supported; remove the line")

    def _node(self, event: Any, depth: int) -> Node:
        self._check_limits(event, 1, depth)
        if isinstance(event, AliasEvent):
            return self._alias(event, depth)
        if event.tag is not None:
            self._problem(event, f"the tag {event.tag!r} is not supported; remove the tag")
        if isinstance(event, ScalarEvent):
            value = self._scalar(event)
        elif isinstance(event, MappingStartEvent):
            value = self._mapping(depth)
        else:
            value = self._sequence(depth)
        node = Node(value, self._origin(event))
        if event.anchor is not None:
            self.anchors[event.anchor] = node
        return node

    def _alias(self, event: AliasEvent, depth: int) -> Node:
        if event.anchor not in self.anchors:
            raise self._error(
                event,
                f"'*{event.anchor}' refers to an anchor '&{event.anchor}' that is not complete "
                "above this line; put quotes around the value if it is text",
            )
        node = self.anchors[event.anchor]
        size, height = _size_and_depth(node)
        # `_node` has already counted the alias as one value.
        self._check_limits(event, size - 1, depth + height - 1)
        return node

    def _mapping(self, depth: int) -> dict[str, Node]:
        found: dict[str, Node] = {}
        while not isinstance(event := next(self.events), MappingEndEvent):
            key_node = self._node(event, depth + 1)
            value = self._node(next(self.events), depth + 1)
            key, origin = key_node.value, self._origin(event)
            # Only an event of a scalar has `implicit`, and a text key is a scalar.
            if key == "<<" and event.implicit[0]:  # pyright: ignore[reportAttributeAccessIssue]
                self._problem(event, "'<<' is not part of YAML 1.2; use `include:` at the top")
            elif not isinstance(key, str):
                shown = "a list or mapping" if isinstance(key, dict | list) else repr(key)
                self._problem(
                    event, f"a key must be text, but this key is {shown}; put quotes around the key"
                )
            elif key in found:
                first = found[key].origin
                self._problem(
                    event, f"the key {key!r} is set twice, first at {first}; remove either line"
                )
            else:
                found[key] = Node(value.value, origin)
        return found

    def _sequence(self, depth: int) -> list[Node]:
        found: list[Node] = []
        while not isinstance(event := next(self.events), SequenceEndEvent):
            found.append(self._node(event, depth + 1))
        return found

    def _scalar(self, event: ScalarEvent) -> Json:
        text: str = event.value
        try:
            text.encode()
        except UnicodeEncodeError:
            self._problem(
                event, f"{text!r} contains half of a \\u surrogate pair; write both halves"
            )
            return None
        if not event.implicit[0]:
            return text
        # Only the first digits are tried, since the conversion of a long number takes quadratic
        # time.
        if len(text) > MAX_DIGITS and not isinstance(plain_scalar(text[:MAX_DIGITS]), str):
            self._problem(
                event, f"the number has {len(text)} digits; at most {MAX_DIGITS} are allowed"
            )
            return None
        return plain_scalar(text)

    def _check_limits(self, event: Event, size: int, depth: int) -> None:
        self.values += size
        if depth > MAX_DEPTH:
            raise self._error(
                event, f"values are nested more than {MAX_DEPTH} levels deep: use fewer levels"
            )
        if self.values > MAX_VALUES:
            raise self._error(
                event,
                (
                    f"the file has more than {MAX_VALUES} values, including the values that "
                    "aliases repeat: write a smaller file"
                ),
            )

    def _origin(self, event: Event) -> Origin:
        return self.locate(event.start_mark.line + 1)

    def _problem(self, event: Event, message: str) -> None:
        self.problems.append(f"{self._origin(event)}: {message}")
        if len(self.problems) == MOST_PROBLEMS:
            raise ConfigError("\n".join([*self.problems, "and perhaps more"]))

    def _error(self, event: Event, message: str) -> ConfigError:
        return ConfigError("\n".join([*self.problems, f"{self._origin(event)}: {message}"]))
