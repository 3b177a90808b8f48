"""The pass over a program that derives the kinds of all values along one mesh axis."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import PurePath
from typing import Any

from jax.extend import core

from jaxdist.proofs.types.collectives import COLLECTIVES, named, on_other_axes, parted
from jaxdist.proofs.types.elementwise import ELEMENTWISE, all_constant
from jaxdist.proofs.types.kinds import (
    DOUBTFUL,
    WHOLE,
    ZERO,
    Count,
    Extreme,
    Joined,
    Kind,
    Multiple,
    Owed,
    Own,
    Part,
    Rank,
    Shard,
    Terms,
    Unknown,
    Value,
    Whole,
    Wrong,
    Zero,
    doubted,
    doubtful,
    joined,
    shard,
    spoiled,
)
from jaxdist.proofs.types.rules import RULES, by_default, label_of

LIBRARY = "in a library"
"""The place that is reported for code without a line outside of libraries."""
PASSES = 8
"""The number of iterations after which a loop is undecided if its kinds still change."""


LOSSY = "jaxdist_lossy"
"""The name of the scope in which `jaxdist.compression.reduce` sends lossy messages instead of
sums."""
OVERWRITING = "overwrite_chunk"
"""The name of the function in `jaxdist.parallel.layer_chunks` that is the body of a loop which
overwrites whole arrays chunk by chunk."""


_MOVING = "reshape broadcast_in_dim transpose squeeze expand_dims slice split concatenate"
KEEPING = ELEMENTWISE | frozenset(_MOVING.split())
"""Operations that a program may apply to a sum before the division that makes the sum a mean."""


LIBRARIES = ("site-packages", "dist-packages", "/jaxdist/proofs/", "/jaxdist/collectives/")
"""Parts of the paths of files that are never reported as the place of an error."""


class Pass:
    """A pass along a single mesh axis over a single `shard_map`.

    Attributes:
      axis: the name of the axis.
      size: the number of devices along the axis.
      findings: place and message of each error, in order.
    """

    def __init__(self, axis: str, size: int) -> None:
        self.axis, self.size = axis, size
        self.findings: dict[tuple[str, str], None] = {}
        self._recording = True
        self._overwrites = False
        self._errors = 0
        self._calls: list[str] = []
        self._doubts = False
        self._seen: dict[Any, tuple[list[Value], bool]] = {}

    def wrong(self, eqn: Any, message: str) -> Kind:
        """Report an error at an equation, and return the kind of its results."""
        if self._doubts:
            return self.undecided(eqn, "sums over a dim that may be sharded, or may not be")
        if LOSSY in str(eqn.source_info.name_stack):
            return self.undecided(eqn, "a lossy message takes the place of a sum, by the config")
        return self.wrong_at(self.place(eqn), message)

    def wrong_at(self, where: str, message: str) -> Kind:
        """Report an error at a place, and return the kind of a wrong value."""
        self._errors += 1
        if not self._recording:
            return Wrong(frozenset())
        self.findings[where, message] = None
        return Wrong(frozenset([(where, message)]))

    def place(self, eqn: Any) -> str:
        """Return the file and line of an equation, or of the innermost call with a known line."""
        return next(
            (line for line in (line_of(eqn), *self._calls[::-1]) if line != LIBRARY), LIBRARY
        )

    def too_large(self, where: str) -> Kind:
        """Report that the sum at a place adds equal values of all devices; return `Wrong`."""
        return self.wrong_at(
            where,
            f"sums over {self.axis!r} what is whole on every device already: the result is "
            f"{self.size} times too large",
        )

    def undecided(self, eqn: Any, message: str) -> Unknown:
        """Return `Unknown`, the kind of a result to which no rule applies, with the reason."""
        return Unknown(frozenset([f"{self.axis}: {self.place(eqn)}: {message}"]))

    def run(self, jaxpr: Any, values: Sequence[Value]) -> list[Value]:
        """Return the kinds of a program's results, from those of its operands.

        Results are cached, since the body of a loop is run several times, together with all loops
        in it. A cached result is not used if a run with errors was not recorded, and errors are to
        be recorded now.
        """
        # `id` identifies a program, since all programs outlive the pass.
        key = id(jaxpr), tuple(values), self._overwrites
        if key in self._seen and (self._seen[key][1] or not self._recording):
            found, settled = self._seen[key]
            self._errors += not settled
            return found
        errors = self._errors
        found = self._run(jaxpr, values)
        self._seen[key] = found, self._recording or self._errors == errors
        return found

    def _run(self, jaxpr: Any, values: Sequence[Value]) -> list[Value]:
        known: dict[Any, Value] = dict(zip(jaxpr.invars, values, strict=True))
        for var in jaxpr.constvars:
            known[var] = Value(WHOLE)

        def read(var: Any) -> Value:
            return known[var] if var in known else _literal(var)

        for eqn in jaxpr.eqns:
            operands = [_literal(v) if isinstance(v, core.Literal) else read(v) for v in eqn.invars]
            found = self.equation(eqn, operands)
            assert len(found) == len(eqn.outvars), eqn.primitive
            known.update(zip(eqn.outvars, found, strict=True))
        return [
            _literal(var) if isinstance(var, core.Literal) else read(var) for var in jaxpr.outvars
        ]

    def equation(self, eqn: Any, values: Sequence[Value]) -> list[Value]:
        """Return the kinds of an equation's results, from those of its operands."""
        name = eqn.primitive.name
        if name == "scan":
            return self._scan(eqn, values)
        if name == "while":
            return self._while(eqn, values)
        if name == "cond":
            return self._cond(eqn, values)
        called = called_by(eqn)
        if name == "shard_map" and self.axis in eqn.params["newly_manual_axes"]:
            return self.region(eqn, values)
        if called is not None:
            rule = named(function_name(eqn, called))
            if rule is not None and values and isinstance(values[-1].kind, Part):
                return [Value(parted(self, eqn, values))]
            if rule is not None and values:
                if self.axis in axes_of(called):
                    return rule(self, eqn, values[-1:])
                other = on_other_axes(function_name(eqn, called), self, eqn, values[-1])
                if other is not None:
                    return [other]
            self._calls.append(line_of(eqn))
            found = self.run(called, values)
            self._calls.pop()
            return found
        if name == "dynamic_update_slice" and self._overwrites:
            return [values[1]]
        if not eqn.outvars:
            return []
        # A sum of equal values may become a mean by a later division, with operations in between
        # that only move or scale it. Any other operation uses the sum, which is too large.
        if name not in KEEPING:
            values = [
                value.of_kind(self.too_large(value.kind.where))
                if isinstance(value.kind, Multiple)
                else value
                for value in values
            ]
        if any(isinstance(value.kind, Part) for value in values):
            kind = parted(self, eqn, values)
            return [Value(kind)] * len(eqn.outvars)
        rule = COLLECTIVES.get(name) or RULES.get(label_of(eqn)) or RULES.get(name, by_default)
        self._doubts = any(doubtful(value.kind) for value in values)
        found = rule(self, eqn, values)
        assert len(found) == len(eqn.outvars), name
        if self._doubts:
            found = [value.of_kind(doubted(value.kind)) for value in found]
        self._doubts = False
        return [
            value
            if fits(value.kind, var.aval)
            else Value(self.undecided(eqn, f"{name} of arrays of unlike kinds joined in one"))
            for value, var in zip(found, eqn.outvars, strict=True)
        ]

    def region(self, eqn: Any, values: Sequence[Value]) -> list[Value]:
        """Return the kinds of a `shard_map`'s results, as values outside of the `shard_map`.

        A result that is whole, or sharded as `out_specs` says, is a whole array outside.
        """
        body = called_by(eqn)
        within = [
            value
            if isinstance(value.kind, Terms) or spoiled([value.kind])
            else entering(spec, self.axis)
            for value, spec in zip(values, eqn.params["in_specs"], strict=True)
        ]
        out = self.run(body, within)
        makers = {var: eqn for eqn in body.eqns for var in eqn.outvars}
        found = []
        for value, spec, var in zip(out, eqn.params["out_specs"], body.outvars, strict=True):
            maker = None if isinstance(var, core.Literal) else makers.get(var)
            kind = check_leaving(self, value, spec, line_of(maker if maker is not None else eqn))
            settled = isinstance(kind, Terms) or spoiled([kind])
            found.append(Value(kind if settled else WHOLE))
        return found

    def _scan(self, eqn: Any, values: Sequence[Value]) -> list[Value]:
        constants, carried = eqn.params["num_consts"], eqn.params["num_carry"]
        fixed = list(values[:constants])
        carry = list(values[constants : constants + carried])
        rows = [
            self._row(eqn, value, var)
            for value, var in zip(
                values[constants + carried :], eqn.invars[constants + carried :], strict=True
            )
        ]
        body = eqn.params["jaxpr"].jaxpr
        if body.debug_info.func_name == OVERWRITING:
            return self._overwrite(body, fixed, carry, rows)
        carry, out = self._settle(eqn, body, fixed, carry, rows)
        stacked = [
            Value(_stacked(value.kind), frozenset(dim + 1 for dim in value.constant))
            for value in out[carried:]
        ]
        return [*carry, *stacked]

    def _overwrite(
        self, body: Any, fixed: Sequence[Value], carry: list[Value], rows: Sequence[Value]
    ) -> list[Value]:
        """Return the kinds of the results of a loop that overwrites all of its carried arrays."""
        outer, self._overwrites = self._overwrites, True
        out = self.run(body, [*fixed, *carry, *rows])
        self._overwrites = outer
        return out

    def _row(self, eqn: Any, value: Value, var: Any) -> Value:
        """Return the kind of a row of an array over which a scan iterates."""
        to = {dim: dim - 1 for dim in range(1, var.aval.ndim)}
        kind = value.kind
        if isinstance(kind, Shard):
            left = kind.dims - {0}
            kind = (
                Shard(frozenset(to[dim] for dim in left), kind.inner)
                if left
                else self.undecided(eqn, "a loop goes over a sharded dim")
            )
        return Value(kind, frozenset(to[dim] for dim in value.constant if dim in to))

    def _settle(
        self,
        eqn: Any,
        body: Any,
        fixed: Sequence[Value],
        carry: list[Value],
        rows: Sequence[Value],
    ) -> tuple[list[Value], list[Value]]:
        """Run a loop's body until the kinds of its carried values no longer change.

        The function returns the kinds of the carried values, and of all results of the body.
        """
        reason = f"{self.axis}: {self.place(eqn)}: a value changes its kind in each pass of a loop"
        recording, self._recording = self._recording, False
        # The first rounds ignore errors, which may be due to buffers that are zero at first and so
        # have no kind of their own yet. The second rounds begin with the kinds of the first.
        for judges in (False, True):
            for _ in range(PASSES):
                out = self.run(body, [*fixed, *carry, *rows])
                after = [
                    a if spoiled([b.kind]) and not judges else joined(a, b, reason)
                    for a, b in zip(carry, out, strict=False)
                ]
                if after == carry:
                    break
                carry = after
            else:
                carry = [Value(Unknown(frozenset([reason])))] * len(carry)
        self._recording = recording
        out = self.run(body, [*fixed, *carry, *rows])
        # The kinds are settled, and this last run records the errors.
        carry = [joined(a, b, reason) for a, b in zip(carry, out, strict=False)]
        return carry, out

    def _while(self, eqn: Any, values: Sequence[Value]) -> list[Value]:
        of_test, of_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        test, fixed = values[:of_test], values[of_test : of_test + of_body]
        carry = list(values[of_test + of_body :])
        carry, _ = self._settle(eqn, eqn.params["body_jaxpr"].jaxpr, fixed, carry, [])
        (goes_on,) = self.run(eqn.params["cond_jaxpr"].jaxpr, [*test, *carry])
        if isinstance(goes_on.kind, Whole | Zero | Count):
            return carry
        kind = spoiled([goes_on.kind]) or self.undecided(
            eqn, "a loop's number of passes differs between devices"
        )
        return [Value(kind)] * len(carry)

    def _cond(self, eqn: Any, values: Sequence[Value]) -> list[Value]:
        index, operands = values[0], values[1:]
        reason = f"{self.axis}: {self.place(eqn)}: the branches give values of unlike kinds"
        found: list[Value] | None = None
        for branch in eqn.params["branches"]:
            out = self.run(branch.jaxpr, operands)
            pairs = zip(found or out, out, strict=True)
            found = [joined(a, b, reason) for a, b in pairs]
        assert found is not None
        if isinstance(index.kind, Whole | Zero | Count):
            return found
        if isinstance(index.kind, Part | Rank):
            return [one.of_kind(parted(self, eqn, [index, one])) for one in found]
        kind = spoiled([index.kind]) or self.undecided(eqn, "devices take different branches")
        return [Value(spoiled([one.kind, kind]) or kind) for one in found]


def fits(kind: Kind, aval: Any) -> bool:
    """Return whether the sizes of joined arrays add up to the size of an array along their dim."""
    if not isinstance(kind, Joined):
        return True
    return kind.dim < aval.ndim and sum(kind.sizes) == aval.shape[kind.dim]


def _stacked(kind: Kind) -> Kind:
    if not isinstance(kind, Shard):
        return kind
    return Shard(frozenset(dim + 1 for dim in kind.dims), kind.inner)


def _literal(var: Any) -> Value:
    value = getattr(var, "val", None)
    zero = value is not None and _is_zero(value)
    return Value(ZERO if zero else WHOLE, all_constant(var.aval))


def _is_zero(value: Any) -> bool:
    try:
        return bool(value == 0)
    except (TypeError, ValueError):  # an array of several elements is neither true nor false
        return False


def called_by(eqn: Any) -> Any:
    """Return the program that an equation calls, without repetition; None if it calls none."""
    for name in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        called = eqn.params.get(name)
        # The program of a Pallas kernel works on references to blocks, and not on arrays.
        if called is not None and eqn.primitive.name not in ("pallas_call",):
            return getattr(called, "jaxpr", called)
    return None


def function_name(eqn: Any, called: Any) -> str:
    """Return the name of the function that an equation calls."""
    return str(eqn.params.get("name") or called.debug_info.func_name or "")


def sub_programs(eqn: Any) -> Iterator[Any]:
    """Yield all programs that are parameters of an equation."""
    for value in eqn.params.values():
        for inner in value if isinstance(value, tuple | list) else [value]:
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield inner


def axes_of(jaxpr: Any) -> set[str]:
    """Return the mesh axes that a program's collectives span."""
    found: set[str] = set()
    for eqn in jaxpr.eqns:
        named_axes = eqn.params.get("axes", eqn.params.get("axis_name", ()))
        if eqn.primitive.name in COLLECTIVES:
            found |= set(named_axes) if isinstance(named_axes, tuple | list) else {named_axes}
        for inner in sub_programs(eqn):
            found |= axes_of(inner)
    return found


def line_of(eqn: Any) -> str:
    """Return the file and line of the user's code that made an equation, outside of libraries."""
    traceback = eqn.source_info.traceback
    for frame in traceback.frames if traceback is not None else ():
        if not any(part in frame.file_name for part in LIBRARIES):
            return f"{PurePath(frame.file_name).name}:{frame.line_num}"
    return LIBRARY


def regions_of(jaxpr: Any) -> Iterator[Any]:
    """Yield every `shard_map` of a program that is not inside another `shard_map`."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "shard_map":
            yield eqn
            continue
        for inner in sub_programs(eqn):
            yield from regions_of(inner)


def manual_axes(eqn: Any) -> set[str]:
    """Return the mesh axes that a `shard_map`, or any `shard_map` inside it, makes manual."""
    return set(eqn.params["newly_manual_axes"]).union(
        *(manual_axes(inner) for inner in regions_of(called_by(eqn)))
    )


def entering(spec: Any, axis: str) -> Value:
    """Return the kind of an operand inside a `shard_map`, by its entry of `in_specs`."""
    for dim, entry in enumerate(spec or ()):
        if axis in (entry if isinstance(entry, tuple) else (entry,)):
            return Value(shard(dim))
    return Value(WHOLE)


def check_leaving(at: Pass, value: Value, spec: Any, where: str) -> Kind:
    """Compare a result of `shard_map` with its entry of `out_specs`, and return its kind.

    Args:
      at: the pass.
      value: the result.
      spec: the result's entry of `out_specs`.
      where: the place to report.
    """
    kind, axis = value.kind, at.axis
    dims = [
        dim
        for dim, entry in enumerate(spec or ())
        if axis in (entry if isinstance(entry, tuple) else (entry,))
    ]
    if isinstance(kind, Multiple):
        return at.too_large(kind.where)
    if spoiled([kind]) or isinstance(kind, Zero):
        return kind
    if not dims:
        if isinstance(kind, Whole | Count):
            return kind
        if isinstance(kind, Part | Own) or kind == DOUBTFUL:
            return Unknown(frozenset([f"{axis}: {where}: {kind} leaves as a whole value"]))
        remedy = {
            Owed: f"a psum over {axis!r} is missing",
            Shard: f"an all-gather over {axis!r} is missing, or {axis!r} in out_specs",
            Extreme: f"a pmax or pmin over {axis!r} is missing",
            Rank: "each device keeps another value",
            Terms: f"a psum over {axis!r} is missing",
        }.get(type(kind), "each part of it needs what it is owed")
        return at.wrong_at(where, f"leaves as a whole value, and is {kind} over {axis!r}: {remedy}")
    if isinstance(kind, Part) or (isinstance(kind, Shard) and dims[0] in kind.dims):
        return kind
    if isinstance(kind, Whole) and dims[0] in value.constant:
        return kind
    if isinstance(kind, Owed):
        return Terms(dims[0])
    if isinstance(kind, Whole):
        return at.wrong_at(
            where,
            f"leaves as shards along dim {dims[0]}, and is whole on every device: the result has "
            f"{at.size} copies of it",
        )
    return Unknown(frozenset([f"{axis}: {where}: a value that is {kind} leaves as shards"]))
