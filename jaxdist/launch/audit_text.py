"""What a compiled program computes, whatever order its instructions stand in."""

from __future__ import annotations

import hashlib
import re

from jaxdist.launch.inspect_text import canonical_text

_COMPUTATION = re.compile(r"((?:ENTRY )?)(%\d+) \{$")
_NAME = re.compile(r"%\d+")


def structure(text: str) -> str:
    """SHA-256 that is equal for programs which differ in names and in the schedule alone.

    Each instruction is hashed with the hashes of its operands and of what it calls, which HLO text
    defines before they are used.

    >>> one, two = "  %a = f32[] parameter(0)", "  %b = f32[] parameter(1)"
    >>> root = "  ROOT %c = f32[] subtract(%a, %b)"
    >>> programs = ["\\n".join(["ENTRY %f () -> f32[] {", *lines, root, "}"])
    ...     for lines in ([one, two], [two, one])]
    >>> structure(programs[0]) == structure(programs[1])
    True
    >>> structure(programs[0]) == structure(programs[0].replace("(%a, %b)", "(%b, %a)"))
    False
    """
    known: dict[str, str] = {}
    module, inside, entry, name = [], [], "", ""
    for line in canonical_text(text).splitlines():
        if match := _COMPUTATION.match(line):
            entry, name = match.groups()
            inside = []
        elif line == "}":
            known[name] = _hash(entry, *sorted(inside))
            module.append(known[name])
        elif name:
            target, _, body = line.strip().removeprefix("ROOT ").partition(" = ")
            known[target] = _hash(_NAME.sub(lambda m: known.get(m[0], "?"), body))
            inside.append(f"ROOT {known[target]}" if "ROOT" in line[:6] else known[target])
    return _hash(*sorted(module))


def _hash(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
