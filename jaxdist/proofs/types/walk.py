"""The pass over a program that derives the kinds of all values along one mesh axis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend import core

from jaxdist.proofs.types import kinds as k
from jaxdist.proofs.types.borders import check_leaving, entering
from jaxdist.proofs.types.collectives import COLLECTIVES, named, on_other_axes, parted
from jaxdist.proofs.types.elementwise import KEEPING, Found, all_constant
from jaxdist.proofs.types.jaxprs import LIBRARY, axes_of, called_by, function_name, line_of
from jaxdist.proofs.types.rules import EACH, RULES, by_default, label_of

PASSES = 8
"""The number of iterations after which a loop is undecided if its kinds still change."""


OVERWRITING = "overwrite_chunk"
"""The name of the function in `jaxdist.parallel.layer_chunks` that is the body of a loop which
overwrites whole arrays chunk by chunk."""


class Pass:
    """A pass along a single mesh axis over a single `shard_map`.

    Attributes:
      axis: the name of the axis.
      size: the number of devices along the axis.
      scheduled: the axes along which devices send values of their own by tables that were checked.
      chosen: whether the present code is in a branch that only some devices take.
      begun: the kind and rank of each sum whose first mark was passed.
      findings: place and message of each error, in order.
    """

    def __init__(self, axis: str, size: int, scheduled: frozenset[str] = frozenset()) -> None:
        self.axis, self.size, self.scheduled = axis, size, scheduled
        self.chosen, self.begun = False, dict[str, tuple[k.Kind, int]]()
        self.findings: dict[tuple[str, str], None] = {}
        self._recording = True
        self._overwrites = False
        self._errors = 0
        self._calls: list[str] = []
        self._doubts = False
        self._seen: dict[Any, tuple[list[k.Value], bool]] = {}

    def wrong(self, eqn: Any, message: str) -> k.Kind:
        """Report an error at an equation, and return the kind of its results."""
        if self._doubts:
            return self.undecided(eqn, "sums over a dim that may be sharded, or may not be")
        return self.wrong_at(self.place(eqn), message)

    def wrong_at(self, where: str, message: str) -> k.Kind:
        """Report an error at a place, and return the kind of a wrong value."""
        self._errors += 1
        if not self._recording:
            return k.Wrong(frozenset())
        self.findings[where, message] = None
        return k.Wrong(frozenset([(where, message)]))

    def place(self, eqn: Any) -> str:
        """Return the file and line of an equation, or of the innermost call with a known line."""
        return next(
            (line for line in (line_of(eqn), *self._calls[::-1]) if line != LIBRARY), LIBRARY
        )

    def too_large(self, where: str) -> k.Kind:
        """Report that the sum at a place adds equal values of all devices; return `Wrong`."""
        return self.wrong_at(
            where,
            f"sums over {self.axis!r} a value that is already whole on every device: the result "
            f"is {self.size} times too large",
        )

    def undecided(self, eqn: Any, message: str) -> k.Unknown:
        """Return `Unknown`, the kind of a result to which no rule applies, with the reason."""
        return k.Unknown(frozenset([f"{self.axis}: {self.place(eqn)}: {message}"]))

    def run(self, jaxpr: Any, values: Sequence[k.Value]) -> list[k.Value]:
        """Return the kinds of a program's results, from those of its operands.

        Results are cached, since the body of a loop is run several times, together with all loops
        in it. A cached result is not used if a run with errors was not recorded, and errors are to
        be recorded now.
        """
        # `id` identifies a program, since all programs outlive the pass.
        key = id(jaxpr), tuple(values), self._overwrites, self.chosen
        if key in self._seen and (self._seen[key][1] or not self._recording):
            found, settled = self._seen[key]
            self._errors += not settled
            return found
        errors = self._errors
        found = self._run(jaxpr, values)
        self._seen[key] = found, self._recording or self._errors == errors
        return found

    def _run(self, jaxpr: Any, values: Sequence[k.Value]) -> list[k.Value]:
        known: dict[Any, k.Value] = dict(zip(jaxpr.invars, values, strict=True))
        for var in jaxpr.constvars:
            known[var] = k.Value(k.WHOLE)

        def read(var: Any) -> k.Value:
            return known[var] if var in known else _literal(var)

        for eqn in jaxpr.eqns:
            operands = [_literal(v) if isinstance(v, core.Literal) else read(v) for v in eqn.invars]
            found = self.equation(eqn, operands)
            assert len(found) == len(eqn.outvars), eqn.primitive
            known.update(zip(eqn.outvars, found, strict=True))
        return [
            _literal(var) if isinstance(var, core.Literal) else read(var) for var in jaxpr.outvars
        ]

    def equation(self, eqn: Any, values: Sequence[k.Value]) -> list[k.Value]:
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
            if rule is not None and values:
                if self.axis in axes_of(called):
                    return _spread(rule(self, eqn, values[-1:]), eqn)
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
                if isinstance(value.kind, k.Multiple)
                else value
                for value in values
            ]
        self._doubts = any(k.doubtful(value.kind) for value in values)
        found = self._by_rule(eqn, values)
        assert len(found) == len(eqn.outvars), name
        if self._doubts:
            found = [value.of_kind(k.doubted(value.kind)) for value in found]
        self._doubts = False
        return [
            value
            if fits(value.kind, var.aval)
            else k.Value(
                self.undecided(eqn, f"{name} of one array that joins arrays of different kinds")
            )
            for value, var in zip(found, eqn.outvars, strict=True)
        ]

    def _by_rule(self, eqn: Any, values: Sequence[k.Value]) -> list[k.Value]:
        name, kinds = eqn.primitive.name, [value.kind for value in values]
        alone = COLLECTIVES.get(name) or EACH.get(name)
        found: Found
        if alone is not None:
            found = alone(self, eqn, values)
        elif any(isinstance(kind, k.Part) for kind in kinds):
            found = parted(self, eqn, values)
        else:
            rule = RULES.get(label_of(eqn)) or RULES.get(name, by_default)
            found = k.spoiled(kinds) or rule(self, eqn, values)
        return _spread(found, eqn)

    def region(self, eqn: Any, values: Sequence[k.Value]) -> list[k.Value]:
        """Return the kinds of a `shard_map`'s results, as values outside of the `shard_map`.

        A result that is whole, or sharded as `out_specs` says, is a whole array outside.
        """
        body = called_by(eqn)
        within = [
            value
            if isinstance(value.kind, k.Terms) or k.spoiled([value.kind])
            else entering(spec, self.axis)
            for value, spec in zip(values, eqn.params["in_specs"], strict=True)
        ]
        out = self.run(body, within)
        makers = {var: eqn for eqn in body.eqns for var in eqn.outvars}
        found = []
        for value, spec, var in zip(out, eqn.params["out_specs"], body.outvars, strict=True):
            maker = None if isinstance(var, core.Literal) else makers.get(var)
            kind = check_leaving(self, value, spec, line_of(maker if maker is not None else eqn))
            settled = isinstance(kind, k.Terms) or k.spoiled([kind])
            found.append(k.Value(kind if settled else k.WHOLE))
        return found

    def _scan(self, eqn: Any, values: Sequence[k.Value]) -> list[k.Value]:
        constants, carried = eqn.params["num_consts"], eqn.params["num_carry"]
        fixed = list(values[:constants])
        carry = list(values[constants : constants + carried])
        if any(isinstance(value.kind, k.Part) for value in values):
            carry = [
                value.of_kind(k.TALLY) if value.kind == k.ZERO and _floats(var) else value
                for value, var in zip(carry, eqn.invars[constants:], strict=False)
            ]
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
            value.moved({dim: dim + 1 for dim in range(var.aval.ndim)})
            for value, var in zip(out[carried:], body.outvars[carried:], strict=True)
        ]
        return [*carry, *stacked]

    def _overwrite(
        self, body: Any, fixed: Sequence[k.Value], carry: list[k.Value], rows: Sequence[k.Value]
    ) -> list[k.Value]:
        """Return the kinds of the results of a loop that overwrites all of its carried arrays."""
        outer, self._overwrites = self._overwrites, True
        out = self.run(body, [*fixed, *carry, *rows])
        self._overwrites = outer
        return out

    def _row(self, eqn: Any, value: k.Value, var: Any) -> k.Value:
        """Return the kind of a row of an array over which a scan iterates."""
        kind = value.kind
        if getattr(kind, "dims", None) == {0} or getattr(kind, "dim", None) == 0:
            value = value.of_kind(self.undecided(eqn, f"a loop goes over the dim of {kind}"))
        return value.moved({dim: dim - 1 for dim in range(1, var.aval.ndim)})

    def _settle(
        self,
        eqn: Any,
        body: Any,
        fixed: Sequence[k.Value],
        carry: list[k.Value],
        rows: Sequence[k.Value],
    ) -> tuple[list[k.Value], list[k.Value]]:
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
                    a if k.spoiled([b.kind]) and not judges else k.joined(a, b, reason)
                    for a, b in zip(carry, out, strict=False)
                ]
                if after == carry:
                    break
                carry = after
            else:
                carry = [k.Value(k.Unknown(frozenset([reason])))] * len(carry)
        self._recording = recording
        out = self.run(body, [*fixed, *carry, *rows])
        # The kinds are settled, and this last run records the errors.
        carry = [k.joined(a, b, reason) for a, b in zip(carry, out, strict=False)]
        return carry, out

    def _while(self, eqn: Any, values: Sequence[k.Value]) -> list[k.Value]:
        of_test, of_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        test, fixed = values[:of_test], values[of_test : of_test + of_body]
        carry = list(values[of_test + of_body :])
        carry, _ = self._settle(eqn, eqn.params["body_jaxpr"].jaxpr, fixed, carry, [])
        (goes_on,) = self.run(eqn.params["cond_jaxpr"].jaxpr, [*test, *carry])
        if isinstance(goes_on.kind, k.Whole | k.Zero | k.Count):
            return carry
        kind = k.spoiled([goes_on.kind]) or self.undecided(
            eqn, "a loop's number of passes differs between devices"
        )
        return [k.Value(kind)] * len(carry)

    def _cond(self, eqn: Any, values: Sequence[k.Value]) -> list[k.Value]:
        index, operands = values[0], values[1:]
        reason = f"{self.axis}: {self.place(eqn)}: the branches give values of unlike kinds"
        found: list[k.Value] | None = None
        outer, own = self.chosen, isinstance(index.kind, k.Part | k.Rank)
        self.chosen = outer or own
        for branch in eqn.params["branches"]:
            out = self.run(branch.jaxpr, operands)
            pairs = zip(found or out, out, strict=True)
            found = [k.joined(a, b, reason) for a, b in pairs]
        assert found is not None
        self.chosen = outer
        if isinstance(index.kind, k.Whole | k.Zero | k.Count):
            return found
        if own:
            kept = (k.ZERO, k.TALLY)
            return [
                one if one.kind in kept else one.of_kind(parted(self, eqn, [index, one]))
                for one in found
            ]
        kind = k.spoiled([index.kind]) or self.undecided(eqn, "devices take different branches")
        return [k.Value(k.spoiled([one.kind, kind]) or kind) for one in found]


def fits(kind: k.Kind, aval: Any) -> bool:
    """Return whether the sizes of joined arrays add up to the size of an array along their dim."""
    if not isinstance(kind, k.Joined):
        return True
    return kind.dim < aval.ndim and sum(kind.sizes) == aval.shape[kind.dim]


def _spread(found: Found, eqn: Any) -> list[k.Value]:
    found = k.Value(found) if isinstance(found, k.Kind) else found
    return [found] * len(eqn.outvars) if isinstance(found, k.Value) else found


def _floats(var: Any) -> bool:
    return jnp.issubdtype(var.aval.dtype, jnp.inexact)


def _literal(var: Any) -> k.Value:
    value = getattr(var, "val", None)
    zero = value is not None and _is_zero(value)
    return k.Value(k.ZERO if zero else k.WHOLE, all_constant(var.aval))


def _is_zero(value: Any) -> bool:
    try:
        return bool(value == 0)
    except (TypeError, ValueError):  # an array of several elements is neither true nor false
        return False
