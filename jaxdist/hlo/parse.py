"""A parser of HLO text, for the part of the grammar that the ledger needs.

The text of a compiled program (`compiled.as_text()`) is a sequence of computations, each with an
instruction per line, in the order of the schedule:

    ROOT %name = type opcode(%operand, ...), attribute=value, ..., metadata={...}, ...
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator
from functools import cached_property

from jaxdist.errors import LedgerError

BITS = {"pred": 8, "token": 0, "opaque": 0}
"""The size in bits of each dtype whose name does not contain its size."""

CALLED = "called_computations"
"""The attribute of a custom call that runs a computation, as on the SparseCores of a TPU."""
CALLS = ("calls", CALLED, "to_apply")
"""The attributes that name the computation that an instruction calls."""
_WITH_PARTS = ("fusion", "fusion-start", "async-start", "call-start")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = ")
_ARRAY = re.compile(r"\b([a-z]+\d*[a-z0-9]*)\[([\d,<=]*)\]")
_NAME = re.compile(r"%([\w.\-#]+)")
_OPCODE = re.compile(r"\s*([\w\-]+)\(")
_TARGET = re.compile(r'\bcustom_call_target="([^"]*)"')
_PARENTHESIS = re.compile(r"[()]")
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')
_BITS = re.compile(r"^[a-z]+(\d+)")


@dataclasses.dataclass(frozen=True)
class ArrayShape:
    """The dtype and dims of an array."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.dims)

    @property
    def bytes(self) -> int:
        """The number of bytes, without the padding of a tiled layout.

        >>> shapes = (("s4", (3,)), ("bf16", (2, 3)), ("f8e4m3fn", ()))
        >>> [ArrayShape(dtype, dims).bytes for dtype, dims in shapes]
        [2, 12, 1]
        """
        bits = BITS.get(self.dtype)
        if bits is None:
            found = _BITS.match(self.dtype)
            assert found, f"dtype {self.dtype} has no size"
            bits = int(found[1])
        return -(-self.elements * bits // 8)


def parse_shapes(text: str) -> tuple[ArrayShape, ...]:
    """Parse the text of a type, and return the shapes of all its arrays in order.

    >>> parse_shapes("(f32[2,3]{1,0:T(8,128)}, /*index=1*/u32[]{:S(2)})")
    (ArrayShape(dtype='f32', dims=(2, 3)), ArrayShape(dtype='u32', dims=()))
    """
    # `<=` marks a dim of variable size, which counts with its largest size.
    return tuple(
        ArrayShape(dtype, tuple(int(dim.lstrip("<=")) for dim in dims.split(",") if dim))
        for dtype, dims in _ARRAY.findall(text)
    )


@dataclasses.dataclass(frozen=True, eq=False)
class Instruction:
    """An instruction of a computation, whose properties are parsed when they are first used."""

    name: str
    opcode: str
    type_text: str
    arguments: str
    """The text in the parentheses, which are operands, a parameter's number or a constant's
    value."""
    attributes: str
    """The text after the parentheses: the attributes and the metadata of the instruction."""
    is_root: bool

    @cached_property
    def shapes(self) -> tuple[ArrayShape, ...]:
        return parse_shapes(self.type_text)

    @cached_property
    def operands(self) -> tuple[str, ...]:
        return tuple(_NAME.findall(self.arguments))

    def number(self, attribute: str) -> int | None:
        """Return the value of an integer attribute, such as `channel_id`.

        The result is None if the instruction does not have the attribute.
        """
        found = re.search(rf"\b{attribute}=(\d+)", self.attributes)
        return int(found[1]) if found else None

    def numbers(self, attribute: str) -> tuple[int, ...]:
        """Return the value of a list attribute, such as `lhs_contracting_dims`.

        The tuple is empty if the instruction does not have the attribute.
        """
        found = re.search(rf"\b{attribute}=\{{([\d,]*)\}}", self.attributes)
        return tuple(map(int, found[1].split(","))) if found and found[1] else ()

    def called(self, attribute: str) -> tuple[str, ...]:
        """Return the names of the computations in an attribute such as `calls` or `body`.

        The tuple is empty if the instruction does not have the attribute.
        """
        found = re.search(rf"\b{attribute}=(%[\w.\-]+|\{{[^}}]*\}})", self.attributes)
        return tuple(_NAME.findall(found[1])) if found else ()

    @property
    def callee(self) -> str:
        """The name of the computation that the instruction calls, or an empty string."""
        return next((name for attribute in CALLS for name in self.called(attribute)), "")

    @property
    def custom_call_target(self) -> str:
        """The target of a custom call, or an empty string for other instructions."""
        if self.opcode != "custom-call":
            return ""
        found = _TARGET.search(self.attributes)
        return found[1] if found else ""

    @property
    def branches(self) -> list[tuple[str, str]]:
        """The branches of a conditional: pairs of a computation's name and its operand's name."""
        names = self.called("branch_computations") or (
            *self.called("true_computation"),
            *self.called("false_computation"),
        )
        return list(zip(names, self.operands[1:], strict=True))

    @property
    def source(self) -> str:
        """The `op_name` of the metadata, or an empty string without metadata."""
        found = re.search(r'\bop_name="((?:[^"\\]|\\.)*)"', self.attributes)
        return found[1] if found else ""


@dataclasses.dataclass(frozen=True, eq=False)
class Computation:
    """The instructions of a computation, in the order of the schedule."""

    name: str
    instructions: tuple[Instruction, ...]

    @cached_property
    def by_name(self) -> dict[str, Instruction]:
        return {instruction.name: instruction for instruction in self.instructions}

    @cached_property
    def positions(self) -> dict[str, int]:
        return {instruction.name: place for place, instruction in enumerate(self.instructions)}

    @cached_property
    def users(self) -> dict[str, list[Instruction]]:
        """For the name of each instruction, the instructions that use its result."""
        found: dict[str, list[Instruction]] = {}
        for instruction in self.instructions:
            # An instruction that uses an operand twice is listed once, because of `dict.fromkeys`.
            for operand in dict.fromkeys(instruction.operands):
                found.setdefault(operand, []).append(instruction)
        return found

    @cached_property
    def root(self) -> Instruction:
        return next(i for i in self.instructions if i.is_root)

    @cached_property
    def custom_call_targets(self) -> frozenset[str]:
        return frozenset(i.custom_call_target for i in self.instructions) - {""}

    def operand_shapes(self, instruction: Instruction) -> list[tuple[ArrayShape, ...]]:
        """Return the shapes of each operand; an operand that is a tuple has several shapes."""
        return [self.by_name[name].shapes for name in instruction.operands]


@dataclasses.dataclass(frozen=True, eq=False)
class Module:
    """A parsed program: its computations by name, and the number of its devices."""

    computations: dict[str, Computation]
    entry: Computation
    replicas: int
    partitions: int

    @property
    def devices(self) -> int:
        return self.replicas * self.partitions

    def parts(
        self, whole: Instruction, around: Computation
    ) -> Iterator[tuple[Instruction, Computation]]:
        """Yield an instruction, and all inside it if it is a fusion or an asynchronous start.

        Each item is a pair of an instruction and the computation that contains the instruction.

        Args:
          whole: the instruction, which is the first item.
          around: the computation that contains `whole`.
        """
        yield whole, around
        pending = [whole.callee] if whole.opcode in _WITH_PARTS else []
        while pending:
            callee = self.computations[pending.pop()]
            for inner in callee.instructions:
                yield inner, callee
                if inner.opcode in ("call", "custom-call", "fusion") and inner.callee:
                    pending.append(inner.callee)


def _closing(text: str, start: int) -> int:
    """Return the index of the parenthesis that closes the parenthesis at `start`."""
    depth = 0
    for match in _PARENTHESIS.finditer(text, start):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return match.start()
    raise LedgerError(
        f"unbalanced parentheses in the HLO line {text.strip()[:120]!r}: pass the "
        "whole text of the program"
    )


def parse_instruction(line: str) -> Instruction | None:
    """Return the instruction on a line, or None if the line has no instruction.

    Raises:
      LedgerError: the instruction on the line is incomplete.

    >>> found = parse_instruction("  ROOT %sum.1 = f32[2]{0} add(%a, %b), metadata={}")
    >>> found.name, found.opcode, found.operands, found.shapes
    ('sum.1', 'add', ('a', 'b'), (ArrayShape(dtype='f32', dims=(2,)),))
    """
    head = _INSTRUCTION.match(line)
    if head is None:
        return None
    start = head.end()
    # The type of a tuple is in parentheses and contains spaces. All other types end at a space.
    end = _closing(line, start) + 1 if line[start] == "(" else line.index(" ", start)
    opcode = _OPCODE.match(line, end)
    if opcode is None:
        raise LedgerError(
            f"no operation in the HLO line {line.strip()[:120]!r}: pass the whole "
            "text of the program"
        )
    closing = _closing(line, opcode.end() - 1)
    return Instruction(
        name=head[2],
        opcode=opcode[1],
        type_text=line[start:end],
        arguments=line[opcode.end() : closing],
        attributes=line[closing + 1 :],
        is_root=head[1] is not None,
    )


def tuple_types(type_text: str) -> list[str]:
    """Return the types of a tuple's elements, given the text of the tuple's type.

    >>> tuple_types("(f32[2,3]{1,0:T(8,128)}, /*index=1*/(u32[], s8[4]))")
    ['f32[2,3]{1,0:T(8,128)}', '/*index=1*/(u32[], s8[4])']
    """
    found, depth, begun = [], 0, 1
    for place, letter in enumerate(type_text):
        depth += (letter in "([{") - (letter in ")]}")
        if (letter == "," and depth == 1) or (place and not depth):
            found.append(type_text[begun:place].strip())
            begun = place + 1
        if place and not depth:
            break
    return found


def _with_elements(instructions: list[Instruction]) -> tuple[Instruction, ...]:
    """Return the instructions with a `get-tuple-element` for each operand such as `%loop#1`.

    Such an operand is an element of a tuple. The XLA of jax 0.11 and newer writes such an operand
    without a `get-tuple-element`.
    """
    known = {instruction.name: instruction for instruction in instructions}
    after: dict[str, list[Instruction]] = {}
    for name in (n for i in instructions for n in i.operands if "#" in n):
        base, *path = name.split("#")
        whole = base
        for index in path:
            element = f"{whole}#{index}"
            if element not in known:
                text = tuple_types(known[whole].type_text)[int(index)]
                known[element] = Instruction(
                    element, "get-tuple-element", text, f"%{whole}", f", index={index}", False
                )
                after.setdefault(base, []).append(known[element])
            whole = element
    return tuple(one for i in instructions for one in (i, *after.get(i.name, ())))


def _whole_lines(lines: Iterable[str]) -> Iterator[str]:
    """Yield the given lines, and join the lines of an instruction that spans several lines."""
    begun: str | None = None
    for line in lines:
        is_new = _INSTRUCTION.match(line) is not None
        if begun is not None and is_new:
            yield begun
        whole = line if begun is None or is_new else f"{begun} {line}"
        goes_on = (is_new or begun is not None) and _is_open(whole)
        begun = whole if goes_on else None
        if not goes_on:
            yield whole
    if begun is not None:
        yield begun


def _is_open(line: str) -> bool:
    """Return whether a line has an open brace; braces in quoted text do not count."""
    # Most lines have equal numbers of opening and closing braces, for which the slow removal of
    # quoted text is not necessary.
    if line.count("{") == line.count("}"):
        return False
    bare = _QUOTED.sub("", line)
    return bare.count("{") > bare.count("}")


def parse(text: str) -> Module:
    """Parse a compiled program.

    Args:
      text: the result of `compiled.as_text()`, for any backend.

    Raises:
      LedgerError: the text is not an HLO program.
    """
    computations: dict[str, Computation] = {}
    entry = name = None
    instructions: list[Instruction] = []
    header, _, body = text.partition("\n")
    for line in _whole_lines(body.splitlines()):
        if name is not None and line.startswith("}"):
            computations[name] = Computation(name, _with_elements(instructions))
            name, instructions = None, []
        elif name is None:
            found = _COMPUTATION.match(line)
            if found:
                name = found[2]
                entry = name if found[1] else entry
        elif (instruction := parse_instruction(line)) is not None:
            instructions.append(instruction)
    if not header.startswith("HloModule") or entry not in computations:
        raise LedgerError(
            f"the text is not a compiled HLO program: it begins with {header[:60]!r} and has "
            f"{len(computations)} computations; pass the result of jit(f).lower(...).compile()"
        )
    replicas, partitions = (
        int(found[1]) if (found := re.search(rf"\b{key}=(\d+)", header)) else 1
        for key in ("replica_count", "num_partitions")
    )
    return Module(computations, computations[entry], replicas, partitions)
