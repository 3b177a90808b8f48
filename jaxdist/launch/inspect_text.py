"""The text of a compiled program without its names, so that two programs can be compared."""

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


def canonical_text(text: str) -> str:
    """HLO text without source positions, names and channel numbers.

    Instructions and computations are numbered in the order in which they are named.

    >>> canonical_text('%add.7 = f32[] add(%x, %x), metadata={op_name="a{b}"}')
    '%0 = f32[] add(%1, %1)'
    """
    text = re.sub(r"^HloModule [^,\n]+", "HloModule", text)
    for noise in (_TABLE, _METADATA, _CHANNEL):
        text = noise.sub("", text)
    text = _HEADER.sub(r"\1 {", text)
    numbers: dict[str, int] = {}
    return _NAME.sub(lambda name: f"%{numbers.setdefault(name[0], len(numbers))}", text)


def digest(text: str, lowered: str = "") -> str:
    """SHA-256 that is equal for programs which differ in names alone.

    Args:
      text: HLO of the compiled program, where large constants are elided.
      lowered: StableHLO that it was compiled from, where they stand in hexadecimal.
    """
    constants = sorted(_LARGE_CONSTANT.findall(lowered))
    return hashlib.sha256("\n".join([canonical_text(text), *constants]).encode()).hexdigest()
