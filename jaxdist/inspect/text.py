"""Digests of compiled programs, for comparisons in which names and order do not count."""

from __future__ import annotations

import hashlib
import re

_TABLE = re.compile(r"^(?:FileNames|FunctionNames|FileLocations|StackFrames)\n(?:.+\n)*", re.M)
_QUOTED = r'"(?:[^"\\]|\\.)*"'
_METADATA = re.compile(rf", (?:metadata|origin)=\{{(?:[^{{}}\"]|{_QUOTED})*\}}")
_CHANNEL = re.compile(r", channel_id=\d+")
_HEADER = re.compile(r"^((?:ENTRY )?%?[\w.\-]+) \(.*\) -> .* \{$", re.M)
_LARGE_CONSTANT = re.compile(r'dense<"0x[0-9A-Fa-f]+"')
_NAME = re.compile(r"%[\w.\-]+")
_COMPUTATION = re.compile(r"((?:ENTRY )?)(%\d+) \{$")


def canonical_text(text: str) -> str:
    """Return HLO text without source positions and channel numbers, and with numbers as names.

    The numbers of instructions and computations are in order of first occurrence.

    >>> canonical_text('%add.7 = f32[] add(%x, %x), metadata={op_name="a{b}"}')
    '%0 = f32[] add(%1, %1)'
    """
    text = re.sub(r"^HloModule [^,\n]+", "HloModule", text)
    for noise in (_TABLE, _METADATA, _CHANNEL):
        text = noise.sub("", text)
    text = _HEADER.sub(r"\1 {", text)
    numbers: dict[str, int] = {}
    return _NAME.sub(lambda name: f"%{numbers.setdefault(name[0], len(numbers))}", text)


def structure(text: str) -> str:
    """Return a SHA-256 hash of a program; names and the schedule do not change the hash.

    The hash of an instruction includes the hashes of its operands and of the computations that it
    calls, which HLO text defines before their use. The hashes within a computation are sorted.

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


def program_digest(text: str, lowered: str) -> str:
    """Return a hash of a program like `structure`, which also depends on large constants.

    Args:
      text: the HLO of the compiled program, in which XLA omits large constants.
      lowered: the StableHLO before compilation, which has large constants in hexadecimal.
    """
    return _hash(structure(text), *sorted(_LARGE_CONSTANT.findall(lowered)))


def _hash(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
