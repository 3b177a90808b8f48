"""Overrides from the command line: `section.key=value` replaces a value of the tree."""

from __future__ import annotations

from jaxdist.config.document import OVERRIDE, KeyPath, Node, Origin, dotted, shown
from jaxdist.config.parse import MAX_DEPTH, parse_yaml
from jaxdist.errors import ConfigError


def apply_override(root: Node, text: str, origin: Origin | None = None) -> Node:
    """Replace the value at the path of an override, without a merge; return the new tree.

    The value is YAML, as in `model.layers=12`, `eval=null` or `mesh={data: 4, tensor: 2}`. An item
    of a list is addressed by its index, as in `data.files.0=a.txt`. Missing sections on the path
    are created. An empty value means null. The argument `origin` is the origin of the value, by
    default the text of the override.

    Raises:
      ConfigError: the text has no `=` or an empty key, the path leads through a scalar or past the
        end of a list, or the value is not YAML.

    >>> root = Node({"model": Node({"layers": Node(2, Origin("x.yaml", 1))}, Origin("x.yaml"))},
    ...     Origin("x.yaml"))
    >>> apply_override(root, "model.layers=12").plain()
    {'model': {'layers': 12}}
    """
    origin = origin or Origin(f"{OVERRIDE}{shown(text)}")
    key, equals, value = text.partition("=")
    parts = [part.strip() for part in key.split(".")]
    if not key.isprintable():
        raise ConfigError(f"{origin}: the key is not printable text; write section.key=value")
    if not equals:
        raise ConfigError(f"{origin}: the setting has no '='; write section.key=value")
    if not all(parts):
        raise ConfigError(f"{origin}: the key is empty; write section.key=value")
    if len(parts) > MAX_DEPTH:
        raise ConfigError(
            f"{origin}: the path has {len(parts)} keys; at most {MAX_DEPTH} are allowed"
        )
    if parts[0] in ("include", "replace"):
        raise ConfigError(
            f"{origin}: {parts[0]!r} can be set only in a config file, not by an override"
        )
    return _set(root, parts, parse_yaml(value, lambda line: origin), ())


def _set(node: Node, parts: list[str], value: Node, done: KeyPath) -> Node:
    if not parts:
        return value
    part, rest = parts[0], parts[1:]
    if isinstance(node.value, list):
        # `isdigit` alone also accepts characters such as a superscript 2, which `int` refuses.
        if not (part.isascii() and part.isdigit() and int(part) < len(node.value)):
            raise ConfigError(
                f"{value.origin}: {dotted(done)} (at {node.origin}) is a list of "
                f"{len(node.value)}, and {part!r} is not an index of the list; count from 0"
            )
        index = int(part)
        items = list(node.value)
        items[index] = _set(items[index], rest, value, (*done, index))
        return Node(items, node.origin)
    if node.value is None:
        node = Node({}, value.origin)
    if not isinstance(node.value, dict):
        raise ConfigError(
            f"{value.origin}: {dotted(done)} is {shown(node.value)} (at {node.origin}), "
            f"not a section, so it has no {part!r}; override {dotted(done)} itself"
        )
    child = node.value.get(part, Node(None, value.origin))
    return Node({**node.value, part: _set(child, rest, value, (*done, part))}, node.origin)
