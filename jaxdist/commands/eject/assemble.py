"""The assembly of an ejected file from pieces; each piece is a module in `pieces`.

A line that ends with `#: NAME` is kept only for configs with the flag NAME. A line that ends with
`#: not NAME` is kept only for configs without the flag. A mark on the first line of a compound
statement applies to the entire statement. Constants are set to the config's values. Imports of
jaxdist, which are in a piece only for the type checker, are dropped.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jax.sharding import PartitionSpec

FOLDER = Path(__file__).parent / "pieces"
WIDTH = 100
_MARK = re.compile(r"  #: (not )?(\w+)(?: # (.*))?$")


class Name(str):
    """The value of a constant that is an expression of other constants, written without quotes."""


@dataclass(frozen=True)
class FilePiece:
    """A piece of an ejected file, with the lines that a config selects.

    Attributes:
      title: the title of the piece's section in the ejected file.
      imports: the import statements of the piece; each imports a single name.
      constants: the assignments of the config's values; each assigns a single constant.
      body: the rest of the code.
    """

    title: str
    imports: tuple[str, ...]
    constants: tuple[str, ...]
    body: str


def assemble_file(
    docstring: str,
    names: Iterable[str],
    flags: Collection[str],
    values: Mapping[str, Any],
) -> str:
    """Return the text of an ejected file.

    Args:
      docstring: the docstring of the file.
      names: the names of the pieces, in order.
      flags: the flags of the config, which select marked lines.
      values: the values of constants by name. Constants that no piece has are ignored.
    """
    pieces = [piece(name, flags, values) for name in names]
    constants = dict.fromkeys(line for piece in pieces for line in piece.constants)
    defined: dict[str, str] = {}
    for line in constants:
        defined.setdefault(line.split(" = ")[0], line)
    before, bodies = "", []
    for one in pieces:
        subject = one.title.split(":")[0]
        bodies.append(one.body if subject == before else f"{comment(one.title)}\n{one.body}")
        before = subject
    body = "\n\n\n".join(bodies)
    code = "\n".join(defined.values()) + "\n\n\n" + body + "\n"
    imports = sorted_imports({line for one in pieces for line in one.imports}, code)
    return f'"""{docstring}"""\n\n{imports}\n\n{code}'


def comment(text: str) -> str:
    """Return a text as comment lines, without empty lines."""
    return "\n".join(f"# {line}" for line in text.splitlines() if line)


def piece(name: str, flags: Collection[str], values: Mapping[str, Any]) -> FilePiece:
    """Return the piece of an ejected file that a module contains.

    Args:
      name: the path of the module in `pieces`, without suffix.
      flags: the flags of the config, which select marked lines.
      values: the values of constants by name.
    """
    text = selected_lines((FOLDER / f"{name}.py").read_text(), flags)
    lines, tree = text.splitlines(), ast.parse(text)
    imports: list[str] = []
    constants: list[str] = []
    end = tree.body[0].end_lineno or 0
    for node in tree.body[1:]:
        assert node.end_lineno is not None
        if isinstance(node, ast.Import | ast.ImportFrom):
            imports += _imported(node)
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            constant = node.targets[0].id
            comment = re.search(r"  # .*$", lines[node.end_lineno - 1])
            constants.append(_constant(constant, values[constant], comment))
        else:
            break
        end = node.end_lineno
    title = ast.get_docstring(tree) or ""
    return FilePiece(title, tuple(imports), tuple(constants), "\n".join(lines[end:]).strip())


def selected_lines(text: str, flags: Collection[str]) -> str:
    """Return the text without marks, and without lines and statements that the flags exclude.

    >>> print(selected_lines("a = 1  #: fast\\nif b:  #: not fast\\n    c = 2\\n", {"fast"}))
    a = 1
    """
    # The statements are visited in reverse order. If several begin on a line, the end of the
    # outermost statement is therefore kept.
    ends = {
        node.lineno: node.end_lineno or node.lineno
        for node in reversed([*ast.walk(ast.parse(text))])
        if isinstance(node, ast.stmt)
    }
    kept: list[str] = []
    after = 0
    for number, line in enumerate(text.splitlines(), 1):
        mark = _MARK.search(line)
        if number <= after:
            continue
        if mark and (mark[2] in flags) == bool(mark[1]):
            after = ends.get(number, number)
            continue
        comment = f"  # {mark[3]}" if mark and mark[3] else ""
        kept.append(line[: mark.start()] + comment if mark else line)
    # The blank lines around a dropped statement become one blank line inside a function, and two
    # blank lines outside of functions.
    return re.sub(r"\n{4,}", "\n\n\n", re.sub(r"\n\n\n+(?= )", "\n\n", "\n".join(kept)))


def _constant(name: str, value: Any, comment: re.Match[str] | None) -> str:
    shown, told = f"{name} = {literal(value)}", comment[0] if comment else ""
    first, *rest = shown.splitlines()
    if rest and len(first + told) <= WIDTH:
        return "\n".join([first + told, *rest])
    if "\n" in shown or len(shown + told) > WIDTH:
        return f"{told.strip()}\n{shown}".strip()
    return shown + told


def literal(value: Any, indent: int = 0) -> str:
    """Return a value as source code; a long mapping or list has a line for each entry.

    Args:
      value: the value.
      indent: the number of spaces before the code.
    """
    if isinstance(value, Name):
        return str(value)
    if isinstance(value, PartitionSpec):
        return f"P({', '.join(map(literal, value))})"
    if isinstance(value, dict):
        entries, brackets = [f"{literal(k)}: " for k in value], "{}"
        values: list[Any] = [*value.values()]
    elif isinstance(value, list | tuple):
        entries, values, brackets = [""] * len(value), [*value], "[]"
        brackets = "[]" if isinstance(value, list) else "()"
    else:
        return f'"{value}"' if isinstance(value, str) else re.sub(r"e-0(?=\d)", "e-", repr(value))
    flat = ", ".join(e + literal(v) for e, v in zip(entries, values, strict=True))
    comma = "," if isinstance(value, tuple) and len(value) == 1 else ""
    one_line = f"{brackets[0]}{flat}{comma}{brackets[1]}"
    if len(one_line) + indent <= WIDTH - 20 and "\n" not in one_line:
        return one_line
    inner = " " * (indent + 4)
    rows = [f"{inner}{e}{literal(v, indent + 4)}," for e, v in zip(entries, values, strict=True)]
    return "\n".join([brackets[0], *rows, " " * indent + brackets[1]])


def _imported(node: ast.Import | ast.ImportFrom) -> list[str]:
    if isinstance(node, ast.Import):
        return [f"import {ast.unparse(alias)}" for alias in node.names]
    if (node.module or "").startswith("jaxdist.commands.eject"):
        return []
    return [f"from {node.module} import {ast.unparse(alias)}" for alias in node.names]


def sorted_imports(lines: Collection[str], code: str) -> str:
    """Return the sorted import statements that the code uses, with the standard library first."""
    used = {node.id for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Name)}
    groups: list[list[tuple[bool, str, str]]] = [[], []]
    for line in lines:
        words = line.split()
        module, bound = words[1], words[-1].split(".")[0]
        if bound in used:
            others = module.split(".")[0] not in sys.stdlib_module_names
            groups[others].append((words[0] == "from", module, line))
    return "\n\n".join("\n".join(_merged(sorted(group))) for group in groups if group)


def _merged(group: list[tuple[bool, str, str]]) -> list[str]:
    """Return import statements in which the imports from the same module are merged.

    Imports with an alias remain separate.
    """
    merged: dict[str, str] = {}
    for is_from, module, line in group:
        key = f"{module}" if is_from and " as " not in line else line
        if key in merged:
            merged[key] += f", {line.split(' import ')[1]}"
        else:
            merged[key] = line
    return [*merged.values()]
