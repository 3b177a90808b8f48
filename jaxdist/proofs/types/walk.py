"""The pass over a program that derives the kinds of all values along one mesh axis."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any

import numpy as np
from jax.extend import core

from jaxdist.jaxprs import equations, scan_counts
from jaxdist.proofs.types import jaxprs
from jaxdist.proofs.types import kinds as k
from jaxdist.proofs.types.borders import dim_of_spec, is_share, leaving
from jaxdist.proofs.types.collectives import COLLECTIVES, OWN_COLLECTIVES, parted
from jaxdist.proofs.types.elementwise import KEEPING
from jaxdist.proofs.types.op import Found, Op, op_of
from jaxdist.proofs.types.rules import RULES, by_default, label_of

PASSES = 8
"""The number of iterations after which a loop is undecided if its kinds still change."""


Turn = Callable[[list[k.Value]], list[k.Value]]
OVERWRITING = "overwrite_chunk"
"""The name of a function in `jaxdist.collectives.layer_chunks`. The function is the body of a loop
that overwrites all elements of arrays chunk by chunk."""
KEPT = ("name", "optimization_barrier", "copy", "copy_p", "reduce_precision")
"""The operations whose results have the kinds of their operands even outside of `shard_map`."""


class Pass:
    """A pass over a program that derives the kinds of its values along a single mesh axis.

    Outside of `shard_map` a program works on whole arrays, whose values do not depend on where XLA
    places them. There the pass only follows values that a `shard_map` has computed. Inside of a
    `shard_map` over the axis, a rule derives the kind of every result.

    Attributes:
      axis: the name of the axis.
      size: the number of devices along the axis.
      scheduled: the axes along which devices exchange values by a pipeline schedule that was
        checked before.
      chosen: whether the pass is in a branch that only some devices take.
      begun: the kind and number of dims of each sum or shard whose first mark was passed (see
        `collectives.marked`).
      findings: the line of code and the message of each error, in order.
      unknown: the reasons why values that leave a `shard_map` are undecided.
    """

    def __init__(self, axis: str, size: int, scheduled: frozenset[str] = frozenset()) -> None:
        self.axis, self.size, self.scheduled = axis, size, scheduled
        self.chosen, self.begun = False, dict[tuple[bool, str], tuple[k.Kind, int]]()
        self.findings: dict[tuple[str, str], None] = {}
        self.unknown: dict[str, None] = {}
        self._recording, self._inside = True, False
        self._overwrites = False
        self._errors = 0
        self._calls: list[str] = []
        self._doubts = False
        self._divisions: dict[Any, Any] = {}
        self._seen: dict[Any, tuple[list[k.Value], bool]] = {}

    def wrong(self, eqn: Any, message: str) -> k.Kind:
        """Report an error at an equation, and return `Wrong`, the kind of its results.

        If an operand is `DOUBTFUL`, nothing is reported, and the result is `Unknown`.
        """
        if self._doubts:
            return self.undecided(
                eqn, "the operand is a sum over a dim that may or may not be sharded"
            )
        library = jaxprs.lines_of(eqn)[1]
        inside = f" (in {library})" if library != jaxprs.LIBRARY else ""
        return self.wrong_at(self.place(eqn), message + inside)

    def wrong_at(self, where: str, message: str) -> k.Kind:
        """Report an error at a file and line, and return `Wrong`."""
        self._errors += 1
        if not self._recording:
            return k.Wrong(frozenset())
        self.findings[where, message] = None
        return k.Wrong(frozenset([(where, message)]))

    def place(self, eqn: Any) -> str:
        """Return the file and line of an equation, or of the innermost call with a known line."""
        lines = jaxprs.line_of(eqn), *self._calls[::-1]
        return next((line for line in lines if line != jaxprs.LIBRARY), jaxprs.LIBRARY)

    @property
    def copies(self) -> str:
        """The message for a sum over devices of values that are equal on every device."""
        return (
            f"sums over {self.axis!r} a value that is already whole on every device: the result "
            f"is {self.size} times too large"
        )

    def undecided(self, eqn: Any, message: str) -> k.Unknown:
        """Return the kind `Unknown` with the reason why no rule applies to an equation."""
        return k.Unknown(frozenset([f"{self.axis}: {self.place(eqn)}: {message}"]))

    def run(self, jaxpr: Any, values: Sequence[k.Value]) -> list[k.Value]:
        """Return the kinds of a program's results, given the kinds of its operands.

        Results are cached, since the body of a loop is run several times, together with all loops
        in it. A cached result is not used if errors must be recorded now, and the cached run had
        errors that were not recorded.
        """
        # `id` identifies a program, since all programs outlive the pass.
        key = id(jaxpr), tuple(values), self._overwrites, self.chosen, self._inside
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

        def read(var: Any) -> k.Value:
            if not isinstance(var, core.Literal) and var in known:
                return known[var]
            if not self._inside:
                return k.Value(k.PLACED)
            literal = isinstance(var, core.Literal)
            zero = literal and np.size(var.val) == 1 and bool(np.all(var.val == 0))
            every = frozenset(range(np.ndim(var.val)) if literal else ())
            return k.Value(k.ZERO if zero else k.WHOLE, every)

        for eqn in jaxpr.eqns:
            found = self.equation(eqn, [read(var) for var in eqn.invars])
            known.update(zip(eqn.outvars, found, strict=True))
        return [read(var) for var in jaxpr.outvars]

    def equation(self, eqn: Any, values: Sequence[k.Value]) -> list[k.Value]:
        """Return the kinds of an equation's results, given the kinds of its operands."""
        name = eqn.primitive.name
        nested = {"scan": self._scan, "while": self._while, "cond": self._cond}.get(name)
        if nested is not None:
            return nested(eqn, values)
        called = jaxprs.called_by(eqn)
        if name == "shard_map" and self.axis in eqn.params["newly_manual_axes"]:
            return self._region(eqn, called, values)
        if called is not None:
            function = str(eqn.params.get("name") or called.debug_info.func_name)
            if values and self._inside and function in OWN_COLLECTIVES:
                given = {"name": function, "ins": [eqn.invars[-1].aval], "over": axes_of(called)}
                op = op_of(self, eqn, values).of(values[-1:], **given)
                return _listed(OWN_COLLECTIVES[function](op), 1)
            self._calls.append(jaxprs.line_of(eqn))
            found = self.run(called, values)
            self._calls.pop()
            return found
        if not self._inside:
            return self._outside(eqn, values)
        if name == "dynamic_update_slice" and self._overwrites:
            return [values[1]]
        # A sum of equal values may become a mean by a later division, with operations in between
        # that only move or scale it. Any other operation uses the sum itself. That is an error,
        # since the sum is too large.
        values = list(values)
        for at, value in enumerate(values):
            if isinstance(value.kind, k.Multiple) and name not in KEEPING:
                values[at] = value.of_kind(self.wrong_at(value.kind.where, self.copies))
        self._doubts = any(k.doubtful(value.kind) for value in values)
        found = self._by_rule(op_of(self, eqn, values))
        if self._doubts:
            found = [value.of_kind(k.doubted(value.kind)) for value in found]
        self._doubts = False
        pairs = zip(found, eqn.outvars, strict=True)
        return [self._fitting(eqn, value, var.aval) for value, var in pairs]

    def _fitting(self, eqn: Any, value: k.Value, aval: Any) -> k.Value:
        """Return a result, which is undecided if its kind is impossible for the array.

        The sizes of joined arrays must add up to the size of the result along the joined dim.

        Args:
          eqn: the equation of the result.
          value: the result.
          aval: the shape and dtype of the result.
        """
        kind = value.kind
        at = kind.dim if isinstance(kind, k.Joined) else -1
        if not isinstance(kind, k.Joined) or aval.shape[at : at + 1] == (sum(kind.sizes),):
            return value
        said = (
            f"no rule covers {eqn.primitive.name} of an array that joins arrays of different kinds"
        )
        return k.Value(self.undecided(eqn, said))

    def _by_rule(self, op: Op) -> list[k.Value]:
        alone = COLLECTIVES.get(op.name)
        rule = RULES.get(label_of(op.eqn)) or RULES.get(op.name, by_default)
        rule = parted if op.has(k.Part) else rule
        found = alone(op) if alone is not None else k.spoiled(op.kinds) or rule(op)
        return _listed(found, len(op.eqn.outvars))

    def _outside(self, eqn: Any, values: Sequence[k.Value]) -> list[k.Value]:
        """Return the kinds of the results of an equation outside of `shard_map`.

        A result is wrong or undecided only because of operands with the same number of elements,
        and of scalars that are stacked. Other operands are ignored: an undecided scalar such as the
        norm of all gradients would make every result undecided.
        """
        name, found = eqn.primitive.name, []
        if name in KEPT:
            return list(values)
        if name == "div":
            self._divisions[eqn.outvars[0]] = eqn
        operands = [self.used(value.kind) for value in values]
        for var in eqn.outvars:
            sizes = {getattr(var.aval, "size", 0), 1 if name in ("stack", "concatenate") else None}
            pairs = zip(operands, eqn.invars, strict=True)
            kinds = [kind for kind, x in pairs if getattr(x.aval, "size", 0) in sizes]
            computed = k.WHOLE if {*kinds} - {k.PLACED} else k.PLACED
            found.append(k.Value(k.spoiled(kinds) or computed))
        return found

    def used(self, kind: k.Kind) -> k.Kind:
        """Return the kind of a value that is used outside of `shard_map`.

        For a `Stacked` value the function also reports the errors that the use shows.
        """
        if not isinstance(kind, k.Stacked):
            return kind
        reasons = sorted(getattr(kind.used, "reasons", ()))
        if self._recording:
            self.unknown |= dict.fromkeys(reasons)
        elif reasons:
            # The reasons for an unknown kind are not recorded in this pass. `_errors` grows, as in
            # `wrong_at`, so that the cached result is not used in a pass that records reasons.
            self._errors += 1
        for where, message in getattr(kind.used, "findings", ()):
            self.wrong_at(where, message)
        return kind.used

    def _region(self, eqn: Any, body: Any, values: Sequence[k.Value]) -> list[k.Value]:
        """Return the kinds that the results of a `shard_map` have outside of the `shard_map`."""
        within = []
        for value, spec, var in zip(values, eqn.params["in_specs"], eqn.invars, strict=True):
            dim, kind = dim_of_spec(spec, self.axis), value.kind
            made = None if isinstance(var, core.Literal) else self._divisions.get(var)
            whole = k.OWED if is_share(eqn, spec, made) else k.WHOLE
            entered = whole if dim is None else k.shard(dim)
            if isinstance(kind, k.Stacked) and kind.dim == dim:
                within.append(kind.inner)
            else:
                within.append(k.Value(k.spoiled([self.used(kind)]) or entered))
        self._inside = True
        out = self.run(body, within)
        self._inside = False
        # A result may be a literal, which has no hash.
        makers = {id(var): made for made in body.eqns for var in made.outvars}
        found = []
        for value, spec, var in zip(out, eqn.params["out_specs"], body.outvars, strict=True):
            dim = dim_of_spec(spec, self.axis)
            kind = leaving(self, value, dim, makers.get(id(var), eqn))
            stacked = k.Stacked(dim or 0, value, kind)
            found.append(k.Value(self.used(stacked) if dim is None else stacked))
        return found

    def _scan(self, eqn: Any, values: Sequence[k.Value]) -> list[k.Value]:
        constants, carried = scan_counts(eqn)
        fixed = list(values[:constants])
        carry, rest = list(values[constants:][:carried]), values[constants + carried :]
        tallies = {k.PART, k.TALLY} & {value.kind for value in values}
        for at, var in enumerate(eqn.invars[constants:][:carried]):
            if tallies and carry[at].kind == k.ZERO and var.aval.dtype.kind == "f":
                carry[at] = carry[at].of_kind(k.TALLY)
        over = zip(rest, eqn.invars[constants + carried :], strict=True)
        rows = [self._row(eqn, value, var) for value, var in over]
        body = eqn.params["jaxpr"].jaxpr

        def turn(carry: Sequence[k.Value]) -> list[k.Value]:
            return self.run(body, [*fixed, *carry, *rows])

        if body.debug_info.func_name == OVERWRITING:
            # The chunks overwrite the carried arrays completely, so the results have the kinds of
            # the chunks and not of the carried arrays.
            outer, self._overwrites = self._overwrites, True
            out = turn(carry)
            self._overwrites = outer
            return out
        carry, out = self._settle(eqn, carry, turn)
        stacked = zip(out[carried:], body.outvars[carried:], strict=True)
        return [*carry, *(value.resized(var.aval.ndim, 1) for value, var in stacked)]

    def _row(self, eqn: Any, value: k.Value, var: Any) -> k.Value:
        """Return the kind of a row of an array over which a scan iterates.

        The result is undecided if the leading dim of the array is sharded.
        """
        kind = value.kind
        if getattr(kind, "dims", None) == {0} or getattr(kind, "dim", None) == 0:
            said = f"a loop iterates over the leading dim of an array that is {kind}"
            value = value.of_kind(self.undecided(eqn, said))
        return value.resized(var.aval.ndim, -1)

    def _settle(self, eqn: Any, carry: list[k.Value], turn: Turn) -> tuple[list[k.Value], ...]:
        """Run a loop's body until the kinds of its carried values no longer change.

        The result is a pair of the carried values and all results of the body. The carried values
        are undecided if their kinds still change after `PASSES` iterations.

        Args:
          eqn: the equation of the loop.
          carry: the initial carried values.
          turn: a function from the carried values to all results of the loop's body.
        """
        changes = self.undecided(eqn, "the kind of a value changes in each iteration of a loop")
        recording = self._recording
        # The first iterations ignore errors, which may be due to buffers that are zero at first and
        # so have no kind yet. The second iterations begin with the kinds that the first iterations
        # have found.
        for judges in (False, True):
            self._recording = recording and judges
            for _ in range(PASSES):
                out = turn(carry)
                after = [
                    a if k.spoiled([b.kind]) and not judges else k.joined(a, b, changes)
                    for a, b in zip(carry, out, strict=False)
                ]
                if after == carry:
                    break
                carry = after
            else:
                carry = [k.Value(changes)] * len(carry)
                out = turn(carry)
        return carry, out

    def _while(self, eqn: Any, values: Sequence[k.Value]) -> list[k.Value]:
        of_test, of_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        test, fixed = values[:of_test], values[of_test : of_test + of_body]
        body, begun = eqn.params["body_jaxpr"].jaxpr, list(values[of_test + of_body :])
        carry, _ = self._settle(eqn, begun, lambda carry: self.run(body, [*fixed, *carry]))
        (goes_on,) = self.run(eqn.params["cond_jaxpr"].jaxpr, [*test, *carry])
        said = "a loop's number of iterations differs between devices"
        return self._agreed(eqn, goes_on, carry, said)

    def _agreed(self, eqn: Any, test: k.Value, found: list[k.Value], said: str) -> list[k.Value]:
        """Return the results of a loop or branch, which are undecided if devices may disagree.

        Args:
          eqn: the equation.
          test: the value that decides about the loop or branch.
          found: the results.
          said: the reason for undecided results.
        """
        if isinstance(test.kind, k.SAME) or not self._inside:
            return found
        kind = k.spoiled([test.kind]) or self.undecided(eqn, said)
        return [k.Value(k.spoiled([one.kind, kind]) or kind) for one in found]

    def _cond(self, eqn: Any, values: Sequence[k.Value]) -> list[k.Value]:
        index, operands = values[0], values[1:]
        differ = self.undecided(eqn, "the branches return values of different kinds")
        outer, own = self.chosen, isinstance(index.kind, k.Part | k.Rank)
        self.chosen = outer or own
        runs = [self.run(branch.jaxpr, operands) for branch in eqn.params["branches"]]
        self.chosen = outer
        either = partial(k.joined, otherwise=differ)
        found = [reduce(either, values) for values in zip(*runs, strict=True)]
        if not own or not self._inside:
            return self._agreed(eqn, index, found, "devices take different branches")
        for at, one in enumerate(found):
            if one.kind not in (k.ZERO, k.TALLY):
                found[at] = one.of_kind(parted(op_of(self, eqn, [index, one])))
        return found


def axes_of(jaxpr: Any) -> set[str]:
    """Return the mesh axes that a program's collectives span."""
    eqns = equations(jaxpr)
    return {a for one in eqns if one.primitive.name in COLLECTIVES for a in jaxprs.axes_over(one)}


def _listed(found: Found, count: int) -> list[k.Value]:
    """Return one value for each of `count` results, from the results of a rule."""
    found = k.Value(found) if isinstance(found, k.Kind) else found
    return [found] * count if isinstance(found, k.Value) else found
