"""The detection of operations that tie the rows of a batch together, in a trace of the loss.

An operation ties rows together if a result for one row depends on other rows, as in a batch norm.
If a batch is divided (among devices, microbatches or workers), a model with such an operation
computes other numbers for a row than on the undivided batch. The trace shows the operations of all
libraries and of the user's code.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, PartitionSpec

from jaxdist.errors import ConfigError, JaxdistError
from jaxdist.jaxprs import scan_counts
from jaxdist.parallel.contract import BatchContext, Exchange
from jaxdist.parallel.exchange.explicit import Explicit
from jaxdist.parallel.exchange.strict import Strict
from jaxdist.parallel.objective import Objective
from jaxdist.types import Buffers, Params, PyTree

_PRIMES = (251, 241, 239, 233, 229, 227, 223, 211)
"""The candidates for the number of rows in the trace. The size of a dim that is not a dim of rows
must not be a multiple of the chosen number."""
_ALONG = {
    "sort": "dimension", "cumsum": "axis", "cumprod": "axis", "cummax": "axis", "cummin": "axis",
    "cumlogsumexp": "axis", "rev": "dimensions",
}  # fmt: skip
"""The primitives that mix elements along a dim and keep the dim. The value is the name of the
primitive's parameter that has the index of the dim."""


class Flow(NamedTuple):
    """The dependence of a value on the rows of a batch.

    Attributes:
      rows: whether the value depends on rows of the batch.
      several: whether the value depends on several rows and has no dim of rows, such as a mean over
        rows.
    """

    rows: bool = False
    several: bool = False


@dataclass(frozen=True)
class RowInterpreter:
    """An interpreter of a traced loss that recognizes dims of rows by their size.

    Attributes:
      count: the number of rows, which is a prime. A dim is a dim of rows if its size is a multiple
        of `count`.
      axes: the manual mesh axes that split the rows. A sum over all these axes is the same on all
        devices, so it does not depend on the division of the rows.
    """

    count: int
    axes: tuple[str, ...]

    def ties(self, jaxpr: Any, given: Sequence[Flow]) -> tuple[list[Flow], list[str]]:
        """Return how each result depends on rows, and describe the operations that tie rows.

        Args:
          jaxpr: the trace.
          given: the flow of each argument of the trace.
        """
        flows = dict(zip(jaxpr.invars, given, strict=True))
        places: list[str] = []
        used = {v for e in jaxpr.eqns for v in e.invars if _is_variable(v)}
        used |= {v for v in jaxpr.outvars if _is_variable(v)}
        for equation in jaxpr.eqns:
            inputs = [flows.get(v, Flow()) if _is_variable(v) else Flow() for v in equation.invars]
            outputs, inner = self._through(equation, inputs, used)
            places += inner
            if not inner and any(self._tied(equation, inputs, v) for v in equation.outvars):
                places.append(_place(equation))
            flows.update(zip(equation.outvars, outputs, strict=True))
        found = [flows.get(v, Flow()) if _is_variable(v) else Flow() for v in jaxpr.outvars]
        return found, places

    def _through(
        self, equation: Any, inputs: list[Flow], used: set[Any]
    ) -> tuple[list[Flow], list[str]]:
        """Return the flows of an equation's results, and the operations in its body that tie rows.

        Only loops, conditionals and calls have a body.

        Args:
          equation: the traced equation to examine.
          inputs: the flow of each input of the equation.
          used: the variables that some equation or the result of the trace reads.
        """
        outputs = [self._out(equation, inputs, variable) for variable in equation.outvars]
        if not any(flow.rows for flow in inputs):
            return outputs, []
        name, settings = equation.primitive.name, equation.params
        if name == "scan":
            constants, carries = scan_counts(equation)
            return self._loop(settings["jaxpr"], inputs, constants, constants + carries, outputs)
        if name == "while":
            before, skipped = settings["cond_nconsts"], settings["body_nconsts"]
            own = inputs[before:]
            found, places = self._loop(settings["body_jaxpr"], own, skipped, len(own), outputs)
            given = [*inputs[:before], *found]
            (again,), more = self.ties(_open(settings["cond_jaxpr"]), given)
            body = _open(settings["body_jaxpr"])
            held = [
                _holds(body, result, carry)
                for result, carry in zip(body.outvars, body.invars[skipped:], strict=True)
            ]
            unread = [variable not in used for variable in equation.outvars]
            apart = [a or b for a, b in zip(held, unread, strict=True)]
            return self._decided(equation, again, found, [*places, *more], apart)
        if name == "cond":
            calls = [(branch, inputs[1:]) for branch in settings["branches"]]
        else:
            calls = [(inner, inputs) for inner in _called(equation)]
        if not calls:
            return outputs, []
        found = [self.ties(_open(inner), given) for inner, given in calls]
        merged = [
            Flow(*map(any, zip(*each, strict=True)))
            for each in zip(*(f for f, _ in found), strict=True)
        ]
        places = [place for _, inner in found for place in inner]
        if name == "cond":
            return self._decided(equation, inputs[0], merged, places, [False] * len(merged))
        return merged, places

    def _decided(
        self,
        equation: Any,
        by: Flow,
        found: list[Flow],
        places: list[str],
        apart: Sequence[bool],
    ) -> tuple[list[Flow], list[str]]:
        """Add the flow of a condition to the flows of the results of a conditional or a loop.

        If the condition depends on several rows, a result without a dim of rows depends on several
        rows too, and the rows of a result with a dim of rows are tied. A condition that has a dim
        of rows (a loop under `vmap`) decides for each row separately, and ties no rows.

        Args:
          equation: the conditional or the loop.
          by: the flow of the condition.
          found: the flows of the results without the condition.
          places: the descriptions of the operations in the body that tie rows.
          apart: for each result, whether the condition does not tie its rows, for one of two
            reasons: a mask keeps the values of rows that are done while the loop runs for other
            rows, or nothing reads the result.

        Returns:
          The flows of the results, and the descriptions of the operations that tie rows.
        """
        if not by.several:
            return found, places
        flows = list(found)
        for i, variable in enumerate(equation.outvars):
            if not self._has(variable):
                flows[i] = Flow(rows=True, several=True)
            elif not apart[i] and not places:
                places = [_place(equation)]
        return flows, places

    def _loop(
        self, body: Any, inputs: list[Flow], first: int, last: int, outputs: list[Flow]
    ) -> tuple[list[Flow], list[str]]:
        """Interpret the body of a loop again and again until the flows of its carry do not change.

        Args:
          body: the body of the loop.
          inputs: the flow of each input of the loop; the carry is `inputs[first:last]`.
          first, last: the bounds of the carry.
          outputs: the flows of the loop's results that follow from their shapes alone.

        Returns:
          The flows of the loop's results, and descriptions of the operations that tie rows.
        """
        given = list(inputs)
        while True:
            found, places = self.ties(_open(body), given)
            carry = [
                Flow(a.rows or b.rows, a.several or b.several)
                # `zip` is not strict, because `found` also has the stacked results, which follow
                # the carry.
                for a, b in zip(given[first:last], found, strict=False)
            ]
            if carry == given[first:last]:
                break
            given[first:last] = carry
        # A scan over rows removes the dim of rows in its body, and its carry depends on all earlier
        # rows.
        merged = [Flow(a.rows, a.several or b.several) for a, b in zip(found, outputs, strict=True)]
        return merged, places

    def _out(self, equation: Any, inputs: Sequence[Flow], variable: Any) -> Flow:
        if self._sums_devices(equation) or not any(flow.rows for flow in inputs):
            return Flow()
        several = not self._has(variable) and any(
            flow.several or (flow.rows and self._has(v))
            for flow, v in zip(inputs, equation.invars, strict=True)
        )
        return Flow(True, several)

    def _tied(self, equation: Any, inputs: Sequence[Flow], variable: Any) -> bool:
        """Return whether an element of a result depends on rows other than the element's row."""
        if not self._has(variable) or self._sums_devices(equation):
            return False
        if any(flow.several for flow in inputs):
            return True
        rows = [
            (i, v)
            for i, (flow, v) in enumerate(zip(inputs, equation.invars, strict=True))
            if flow.rows and self._has(v)
        ]
        # If each input has one dim of rows and the result has two, an element of the result belongs
        # to a pair of rows.
        if (
            rows
            and len(self._places(variable)) > 1
            and all(len(self._places(v)) < 2 for _, v in rows)
        ):
            return True
        return any(set(_mixed(equation, i)) & set(self._places(v)) for i, v in rows)

    def _sums_devices(self, equation: Any) -> bool:
        named = equation.params.get("axes") or equation.params.get("axis_name") or ()
        named = named if isinstance(named, tuple) else (named,)
        return bool(self.axes) and set(self.axes) <= set(named)

    def _has(self, variable: Any) -> bool:
        return bool(self._places(variable))

    def _places(self, variable: Any) -> tuple[int, ...]:
        """Return the indices of the dims of rows in the shape of a variable."""
        shape = getattr(variable.aval, "shape", ())
        return tuple(i for i, n in enumerate(shape) if n and n % self.count == 0)


def check_rows(
    objective: Objective,
    batch: Mapping[str, Any],
    exchange: Exchange,
    *,
    local: bool,
    microbatches: int,
) -> tuple[str, ...]:
    """Check whether a plan changes the results of a model that ties rows together.

    The BatchNorm layers of flax average over all devices, so they are accepted. In strict mode they
    are not accepted, because strict mode computes each logical shard separately.

    Args:
      objective: the model and its loss.
      batch: the arrays of a batch, or their shapes.
      exchange: the exchange of the plan.
      local: whether the config asks for statistics over the rows of one device.
      microbatches: the number of microbatches of a batch.

    Returns:
      Sentences for the user: that microbatches change the results of the model, or that the trace
      failed. The result is () if the plan does not change the results.

    Raises:
      ConfigError: the exchange divides the rows among devices or logical shards, and the model or
        the loss would therefore compute other numbers than on a single device.
    """
    try:
        if isinstance(exchange, Explicit) and not local:
            _check_exchange(objective, batch, exchange)
        if microbatches == 1:
            return ()
        mesh = jax.tree.leaves(exchange.placements.shares)[0].mesh
        place = ties_rows(objective, batch, mesh, ())
    except JaxdistError:
        raise
    except Exception as error:
        # The check calls the user's code with a number of rows that never occurs in the user's
        # data, so the code may raise any exception.
        return (
            "cannot determine whether the model computes across the examples of a batch, "
            f"because the model fails for a batch of another size ({error}). "
            "If it does, the parts of a batch give other numbers than the whole batch",
        )
    if not place:
        return ()
    return (
        f"train.microbatches {microbatches}: the model computes across the examples of a batch "
        f"({place}), but each microbatch is computed separately. Batch statistics are those of a "
        "microbatch, running statistics are updated once for each microbatch, and losses differ "
        "from those of the whole batch. For the numbers of the whole batch, set "
        "train.microbatches: 1",
    )


def _check_exchange(objective: Objective, batch: Mapping[str, Any], exchange: Explicit) -> None:
    """Refuse a model that ties rows of different devices, or of different logical shards.

    Raises:
      ConfigError: the model has an operation that ties such rows.
    """
    strict = isinstance(exchange, Strict)
    pieces = exchange.order.shards if strict else _parts(exchange.mesh, exchange.axes)
    if pieces == 1:
        return
    inside = BatchContext(exchange.axes, () if strict else exchange.axes)
    place = ties_rows(objective, batch, exchange.mesh, exchange.axes, inside=inside)
    if not place:
        return
    cut, remedy = (
        "each device computes only its own examples",
        "Set parallel.reduce: null, which computes with the whole batch",
    )
    if strict:
        cut, remedy = (
            "strict mode computes each logical shard separately",
            "Set parallel.deterministic: null",
        )
    raise ConfigError(
        f"the model or its loss computes across the examples of a batch ({place}), but {cut}, so "
        f"the result would differ from the result for the whole batch. {remedy}, or set "
        "parallel.batch_norm: local (statistics of each part)",
        setting=("batch_norm",),
    )


def _parts(mesh: Mesh, axes: Sequence[str]) -> int:
    return math.prod(mesh.shape[axis] for axis in axes)


def ties_rows(
    objective: Objective,
    batch: Mapping[str, Any],
    mesh: Mesh,
    axes: tuple[str, ...],
    *,
    inside: BatchContext | None = None,
) -> str:
    """Describe the first operation of a model or its loss that ties rows together in training.

    The loss is traced with a prime number of rows on each device, and is not computed.

    Args:
      objective: the model and its loss.
      batch: the arrays of a batch, or their shapes.
      mesh: the mesh for which the model is traced.
      axes: the mesh axes that split the batch.
      inside: the context for the rows of one device, in which `axes` are manual, or None to trace
        the batch of all devices as one global array.

    Returns:
      A description of the operation, or "" if no operation ties rows.

    Raises:
      Exception: the user's code fails for this number of rows.
    """
    count = next(p for p in _PRIMES if not any(n % p == 0 for n in _sizes(objective, batch)))
    rows = {
        name: jax.ShapeDtypeStruct((count * _parts(mesh, axes), *x.shape[1:]), x.dtype)
        for name, x in batch.items()
    }
    manual = axes if inside is not None else ()

    def run(params: Params, buffers: Buffers, key: jax.Array, batch: PyTree) -> PyTree:
        # The new buffers are left out, because running statistics always depend on several rows.
        return objective.sums(params, buffers, batch, key, inside or BatchContext())[1][0]

    local = partial(jax.shard_map, mesh=mesh, axis_names=set(manual), check_vma=False)
    whole, split = PartitionSpec(), PartitionSpec(manual)
    traced = run
    if manual:
        traced = local(run, in_specs=(whole, whole, whole, split), out_specs=whole)
    key = jax.eval_shape(lambda: jax.random.key(0))
    given = (objective.model.params, objective.model.buffers, key, rows)
    jaxpr = jax.make_jaxpr(traced)(*given).jaxpr
    flows = [
        Flow(rows=True) if i >= len(jaxpr.invars) - len(rows) else Flow()
        for i in range(len(jaxpr.invars))
    ]
    return next(iter(RowInterpreter(count, manual).ties(jaxpr, flows)[1]), "")


def _mixed(equation: Any, at: int) -> Sequence[int]:
    """Return the dims along which an equation mixes elements of its input number `at`."""
    name = equation.primitive.name
    if name == "dot_general":
        return equation.params["dimension_numbers"][0][at]
    found = equation.params.get(_ALONG.get(name, ""), ())
    return found if isinstance(found, tuple) else (found,)


def _sizes(objective: Objective, batch: Mapping[str, Any]) -> Iterator[int]:
    """Yield the sizes of the dims of parameters, buffers and batch that are not dims of rows."""
    for leaf in jax.tree.leaves((objective.model.params, objective.model.buffers)):
        yield from (n for n in leaf.shape if n)
    for leaf in batch.values():
        yield from (n for n in leaf.shape[1:] if n)


def _called(equation: Any) -> list[Any]:
    """Return a list with the program that an equation calls on its inputs, or [] without a call."""
    shapes = [getattr(v.aval, "shape", None) for v in equation.invars]
    for value in equation.params.values():
        inner = _open(value)
        if hasattr(inner, "eqns") and len(inner.outvars) == len(equation.outvars):
            given = [getattr(v.aval, "shape", None) for v in inner.invars]
            if given == shapes or equation.primitive.name == "shard_map":
                return [value]
    return []


def _holds(jaxpr: Any, result: Any, carry: Any) -> bool:
    """Return whether a result of a loop's body is its carry, or a masked choice with the carry.

    A loop with such a mask computes each row until the row is done, as in `jax.random.poisson`.
    The values of the mask are not examined.

    Args:
      jaxpr: the body of the loop.
      result: the variable of the carry after an iteration.
      carry: the variable of the same carry before an iteration.
    """
    if result is carry:
        return True
    for equation in jaxpr.eqns:
        if not any(v is result for v in equation.outvars):
            continue
        if equation.primitive.name in ("select_n", "and", "or"):
            return any(v is carry for v in equation.invars)
        at = next(i for i, v in enumerate(equation.outvars) if v is result)
        for inner in map(_open, _called(equation)):
            for own, given in zip(equation.invars, inner.invars, strict=True):
                if own is carry and _holds(inner, inner.outvars[at], given):
                    return True
    return False


def _open(jaxpr: Any) -> Any:
    return getattr(jaxpr, "jaxpr", jaxpr)


def _is_variable(node: Any) -> bool:
    return not hasattr(node, "val")


def _place(equation: Any) -> str:
    """Describe an operation by its primitive and its scope, so that users find it in a model."""
    scope = str(equation.source_info.name_stack)
    return f"{equation.primitive.name} in {scope}" if scope else equation.primitive.name
