"""The bytes of a compiled step beside those that its code asks for, with planted errors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxdist.proofs.sent import Sent, compare, owed_sums

MESH = Mesh(jax.devices()[:4], ("d",))


def placed(shape: tuple[int, ...], spec: P) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(MESH, spec))


def sent(
    step: Callable[..., Any],
    *given: Any,
    compiled: Callable[..., Any] | None = None,
    owed: Any = None,
) -> Sent:
    """Compare a step with its compiled program, or with that of another step."""
    program = jax.jit(compiled or step).lower(*given).compile()
    return compare(jax.make_jaxpr(step)(*given), program, MESH, given[:1], owed)


@partial(jax.shard_map, mesh=MESH, in_specs=P("d"), out_specs=(P(), P()), check_vma=False)
def two_sums(x: Any) -> Any:
    wide = lax.psum(x, "d")
    return wide, lax.psum(x[:, :1], "d")


@partial(jax.shard_map, mesh=MESH, in_specs=P("d"), out_specs=(P(), P()), check_vma=False)
def one_sum(x: Any) -> Any:
    return x, lax.psum(x[:, :1], "d")


def test_a_sum_that_the_compiled_program_lacks_is_named_by_its_line():
    """The other sum over the axis remains, so that the program sends something."""
    rows = placed((8, 64), P("d"))
    assert not sent(two_sums, rows).missing
    (missing,) = sent(two_sums, rows, compiled=one_sum).missing
    first = two_sums.__wrapped__.__code__.co_firstlineno
    assert missing.startswith(f"test_sent.py:{first + 2}"), missing
    assert "must send at least 390 B over d, but the compiled program sends 12 B" in missing


def test_a_resharding_is_unasked_and_named_by_its_line():
    def step(x: Any) -> Any:
        return lax.with_sharding_constraint(jnp.tanh(x) * 2, NamedSharding(MESH, P(None, "d")))

    (found,) = sent(step, placed((8, 8), P("d"))).unasked
    line = step.__code__.co_firstlineno + 1
    assert (found.kind, found.axes, found.where) == ("all-to-all", ("d",), f"test_sent.py:{line}")


def test_rows_that_xla_gathers_are_unasked():
    """The state is whole on every device, so that no gather of a stored array explains it."""

    def step(w: Any, x: Any) -> Any:
        return w + jnp.sort(x, axis=0)[0]

    found = sent(step, placed((3,), P()), placed((8, 3), P("d"))).unasked
    assert {one.where for one in found} == {f"test_sent.py:{step.__code__.co_firstlineno + 1}"}


@pytest.mark.parametrize("rows", [P("d"), P()])
def test_sums_of_gradients_are_owed(rows):
    """A batch that every device has whole needs none, which is not what the config asks for."""

    def step(w: Any, x: Any) -> Any:
        return w - jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(w)

    given = placed((16, 4), P()), placed((8, 16), rows)
    owed = owed_sums(given[0], MESH, ["d"])
    assert owed == {"d": 3 / 4 * 256}
    missing = sent(step, *given, owed=owed).missing
    assert bool(missing) != bool(rows)
    assert all(
        "sums of gradients: each device must send at least 192 B over d, but" in m for m in missing
    )


def test_what_is_owed_is_a_part_of_what_other_axes_split():
    mesh = Mesh([[jax.devices()[i + j] for i in (0, 1)] for j in (0, 2)], ("dcn", "ici"))
    leaf = jax.ShapeDtypeStruct((16,), jnp.float32, sharding=NamedSharding(mesh, P()))
    assert owed_sums([leaf], mesh, ["dcn", "ici"]) == {"dcn": 16.0, "ici": 16.0}
