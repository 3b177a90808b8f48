"""Strict mode: the order of sums, the same bits on any number of devices, and what is refused."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import strict_cases
from hypothesis import given
from hypothesis import strategies as st

from jaxdist.errors import ConfigError
from jaxdist.hlo import ledger
from jaxdist.inspect.ideal import bound_notes, gradient_bound
from jaxdist.parallel.strict.check import check_update
from jaxdist.parallel.strict.pieces import in_pieces
from jaxdist.parallel.strict.tree import Order, add_blocks
from jaxdist.trees import tree_bytes


def divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def paired(leaves: list[str], run: int) -> str:
    """The sum of leaves as it is written down, by the definition of the order."""
    if len(leaves) > run:
        parts = [paired(leaves[i : i + run], run) for i in range(0, len(leaves), run)]
        total = parts[0]
        for part in parts[1:]:
            total = f"({total}+{part})"
        return total
    if len(leaves) == 1:
        return leaves[0]
    half = len(leaves) // 2
    return f"({paired(leaves[:half], run)}+{paired(leaves[half:], run)})"


@given(st.integers(1, 48))
def test_what_devices_have_are_whole_parts_of_the_one_tree(shards: int) -> None:
    order = Order(shards)
    names = [str(i) for i in range(shards)]
    whole = paired(names, order.run)
    for count in divisors(shards):
        local = order.on(count)
        assert local.blocks * local.block == local.shards == shards // count
        for begin in range(0, shards, local.block):
            assert paired(names[begin : begin + local.block], order.run) in whole
    assert all(order.on(count).blocks == 1 for count in divisors(shards) if shards == order.run)


@pytest.mark.parametrize("shards", [1, 6, 8, pytest.param(12, marks=pytest.mark.full)])
@pytest.mark.every(3)
def test_sums_have_the_bits_of_the_order_however_many_devices(shards: int) -> None:
    order = Order(shards)
    values = np.random.default_rng(0).normal(size=(shards, 33)).astype(np.float32)
    # Sums of many sizes, which no other order gives.
    values *= 10.0 ** np.arange(shards)[::-1, None] % 997

    def exact(begin: int, count: int) -> np.ndarray:
        if count == 1:
            return values[begin]
        return exact(begin, count // 2) + exact(begin + count // 2, count // 2)

    expected = exact(0, order.run)
    for begin in range(order.run, shards, order.run):
        expected = expected + exact(begin, order.run)
    for count in divisors(shards):
        local = order.on(count)

        @jax.jit
        def blocks(rows: jax.Array, local=local) -> Any:
            return add_blocks(lambda i: (rows[i], jnp.int32(i)), local)

        found = [blocks(rows) for rows in values.reshape(count, -1, 33)]
        total = order.add(jnp.concatenate([sums for sums, _ in found]))
        assert np.asarray(total).tobytes() == expected.tobytes()
        # Integers are not summed.
        assert [int(last[-1]) for _, last in found] == [local.shards - 1] * count


def test_an_update_in_pieces_is_the_update() -> None:
    def function(grads, params, more):
        return params["w"] * more - grads["w"], {"n": params["n"] + 1}

    grads, params = (
        {"w": jnp.arange(24.0).reshape(2, 12)},
        {"n": jnp.int32(3), "w": jnp.ones((2, 12))},
    )

    def run(grads, params, more):
        found, count = function(grads, params, more)
        return ({"n": count["n"], "w": found},)

    (found,) = jax.jit(lambda g, p: in_pieces(run, 4, [g, p], [[1], [None, 1]], (jnp.float32(2),)))(
        grads, params
    )
    assert int(found["n"]) == 4
    np.testing.assert_array_equal(found["w"], 2 - grads["w"])


FULL = [
    ("nnx", "guarded", 4, 1, {"lookahead": 2, "microbatches": 2}),
    ("gpt bfloat16", "masters", 8, 1, {}),
    ("cnn", "sgd", 8, 2, {}),
]
"""A row for each kind of model and of state."""
SLOW = [
    ("mlp", "adamw", 4, 1, {}),  # in processes: tests/run/test_strict_run.py
    ("gpt", "adamw", 8, 3, {"lookahead": 2}),
    ("mlp", "moments", 12, 0, {"microbatches": 2}),
    ("linen", "lamb", 8, 0, {}),
    ("linen", "sgd", 8, 0, {}),
    ("mlp", "lamb", 8, 0, {}),
    ("mlp", "adamw", 4, 0, {}),
    ("gpt bfloat16", "adamw", 8, 0, {}),
    ("mlp", "scaled", 8, 3, {}),
    ("nnx", "spikes", 6, 0, {}),
    ("mlp", "lars", 8, 0, {}),
]
CASES = [
    *FULL,
    *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW),
]


def ids(case: Any) -> str:
    return " ".join(map(str, case)) if isinstance(case, tuple) else str(case)


@pytest.mark.parametrize("case", CASES, ids=ids)
@pytest.mark.full
def test_the_bits_are_those_of_one_device(case: tuple[str, str, int, int, dict[str, Any]]) -> None:
    name, kind, shards, stage, more = case
    # On half of the devices of 8 shards both are summed, those of a device and those of several.
    greatest = case not in FULL[1:]
    sections = strict_cases.config(name, kind, shards, stage, **more)
    found = strict_cases.on_some(sections, greatest=greatest)
    assert len(found) == 2 + greatest
    assert [prints for prints in found.values() if prints != found[1]] == []


@pytest.mark.slow
def test_a_shard_of_one_element_is_divided_as_any() -> None:
    sections = strict_cases.config("mlp", "adamw", 8, 1)
    sections["model"] = {"type": "mlp", "hidden": [40, 8]}
    sections["parallel"]["zero"]["whole_below"] = 1
    found = [strict_cases.prints(strict_cases.built(sections, {"data": n}, n)) for n in (1, 8)]
    assert found[0] == found[1]


@pytest.mark.full
def test_an_update_is_the_same_program_on_any_number_of_devices() -> None:
    """LAMB sums in another way where XLA may have split an array along an automatic axis."""

    def reductions(count: int) -> list[str]:
        sections = strict_cases.config("mlp", "lamb", 4, 0)
        program = strict_cases.built(sections, {"data": count}, count).program
        text = program.train.lower(program.state_shapes, program.batch).as_text()
        return sorted(re.findall(r"stablehlo.reduce\(.* : \((.*)\) ->", text))

    one, four = reductions(1), reductions(4)
    assert one == four


@pytest.mark.slow
def test_cases_drawn_at_random() -> None:
    """With XLA's own flags, in a process of its own."""
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    script = strict_cases.__file__
    done = subprocess.run(
        [sys.executable, script, "0", "24"], env={**os.environ, **flags}, capture_output=True,
        text=True, timeout=3600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert done.stdout.count("same") == 24


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "other"), [
    ({"data": {"dcn": 2, "ici": 2}}, {"data": 1}),
    pytest.param({"data": 4, "tensor": 2}, {"data": 2, "tensor": 2}, marks=pytest.mark.slow),
])  # fmt: skip
def test_two_networks_and_a_tensor_axis_keep_them_too(mesh: dict, other: dict) -> None:
    sections = strict_cases.config("gpt", "adamw", 4, 0)

    def count(mesh: dict[str, Any]) -> int:
        sizes = [n["dcn"] * n["ici"] if isinstance(n, dict) else n for n in mesh.values()]
        return math.prod(sizes)

    found = [strict_cases.prints(strict_cases.built(sections, m, count(m))) for m in (mesh, other)]
    assert found[0] == found[1]


@pytest.mark.slow
def test_without_it_the_bits_differ() -> None:
    """Or else all the above would say nothing."""
    sections = strict_cases.config("mlp", "adamw", 4, 0)
    sections["parallel"] = {}
    found = [strict_cases.prints(strict_cases.built(sections, {"data": n}, n)) for n in (1, 4)]
    assert found[0]["state"] != found[1]["state"]


@cache
def compiled(shards: int, stage: int, count: int = 4) -> Any:
    sections = strict_cases.config("mlp", "adamw", shards, stage)
    found = strict_cases.built(sections, {"data": count}, count)
    program = found.program
    return found, program.train.lower(program.state_shapes, program.batch).compile()


@pytest.mark.parametrize(
    ("shards", "blocks"), [(8, 1), pytest.param(12, 3, marks=pytest.mark.full)]
)
@pytest.mark.full
def test_what_is_sent_is_a_reduction_of_as_many_gradients_as_it_says(
    shards: int, blocks: int
) -> None:
    found, program = compiled(shards, 0)
    read = ledger(program, found.layout.mesh)
    exchange: Any = found.program.exchange
    assert exchange.local.blocks == blocks
    size = tree_bytes(found.program.model.params)
    by_kind = {
        kind: sum(c.sent_bytes * c.times_high for c in read.collectives if c.kind == kind)
        for kind in ("all-to-all", "all-gather", "all-reduce")
    }
    padding = 64
    assert by_kind["all-to-all"] == pytest.approx(blocks * 3 / 4 * size, abs=blocks * padding)
    assert by_kind["all-gather"] == pytest.approx(3 / 4 * size, abs=3 * padding)
    assert by_kind["all-reduce"] == 0
    bound = gradient_bound(found)
    assert bound is not None
    assert (sum(by_kind.values()) <= 1.02 * bound[1]) == (blocks == 1)
    shown = [note for note in bound_notes(found) if f"{blocks} chunks" in note]
    assert bool(shown) == (blocks > 1)


@pytest.mark.slow
def test_products_are_counted_though_the_compiler_does_not_see_how_often() -> None:
    alone, four = (ledger(compiled(8, 0, n)[1], compiled(8, 0, n)[0].layout.mesh) for n in (1, 4))
    assert alone.flops_low == alone.flops_high == pytest.approx(4 * four.flops_low)


def test_it_says_what_it_does() -> None:
    found, _ = compiled(8, 0)
    assert (
        "strict: 8 logical shards, 2 on each device, which holds at most 3 gradients and sends 1; "
        "any number of devices along data that divides 8 gives the same bits"
    ) in found.explained


TWO = {"data": {"dcn": 2, "ici": 2}}
REFUSED: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("three devices", {"data": 3}, {}, r"shards.* 8 logical shards do not divide over 3"),
    ("no data axis", {"tensor": 2}, {}, "but no axis splits the batch"),
    ("stages", {"data": 2, "stage": 2}, {}, "in the order of their schedule"),
    ("context", {"data": 2, "context": 2}, {}, "the bits of its gradients may depend"),
    ("reduction", {"data": 2}, {"reduce": {"type": "ring"}}, "in a fixed order"),
    ("messages", {"data": 2}, {"compression": {"type": "sign"}}, "set parallel.compression: null"),
    ("ici", TWO, {"zero": {"stage": 1, "scope": "ici"}}, "zero.scope: all"),
    ("tensor and zero", {"data": 2, "tensor": 2}, {"zero": {"stage": 1}}, "the norm of gradients"),
    ("host", {"data": 2}, {"zero": {"stage": 1, "offload": True}}, "zero.offload: false"),
    ("second copy", TWO, {"zero": {"stage": 3, "secondary": True}}, "a second copy saves nothing"),
]  # fmt: skip


def refused(mesh: dict[str, Any], **changes: Any) -> str:
    sections = strict_cases.config("gpt", "adamw", 8, 0) | changes
    count = 1
    for size in mesh.values():
        count *= size["dcn"] * size["ici"] if isinstance(size, dict) else size
    with pytest.raises(ConfigError) as told:
        strict_cases.built(sections, mesh, count)
    return " ".join(str(told.value).split())


@pytest.mark.parametrize(("mesh", "parallel", "message"), [row[1:] for row in REFUSED],
                         ids=[row[0] for row in REFUSED])  # fmt: skip
def test_what_cannot_keep_its_bits_is_refused(
    mesh: dict[str, Any], parallel: dict[str, Any], message: str
) -> None:
    strict = {"deterministic": {"type": "strict", "shards": 8}, **parallel}
    assert_in(message, refused(mesh, parallel=strict))


def assert_in(pattern: str, text: str) -> None:
    assert re.search(pattern, text), text


def test_a_batch_divides_over_shards_and_microbatches() -> None:
    train = {"steps": 3, "batch_size": 48, "microbatches": 4}
    assert_in(
        "48 does not divide over 8 logical shards x 4 microbatches = 32 parts; use 32 or 64",
        refused({"data": 2}, train=train),
    )


@pytest.mark.parametrize("name", ["nnx", "linen"])
def test_a_batch_norm_over_the_whole_batch_is_refused(name: str) -> None:
    sections = strict_cases.config(name, "adamw", 8, 0)
    sections["parallel"]["batch_norm"] = "global"
    with pytest.raises(ConfigError, match=r"parallel\.batch_norm: local"):
        strict_cases.built(sections, {"data": 1}, 1)


def test_servers_are_refused() -> None:
    strict = {"deterministic": {"type": "strict", "shards": 8}}
    servers = {"type": "parameter_server", "workers": 2}
    message = refused({"data": 1}, strategy=servers, parallel=strict)
    assert_in("set parallel.deterministic: null", message)


@pytest.mark.parametrize("kind", ["lamb", "lars", "spikes", "moments"])
def test_an_update_that_goes_over_several_elements_is_refused_with_zero(kind: str) -> None:
    sections = strict_cases.config("mlp", kind, 8, 1)
    with pytest.raises(ConfigError, match=r"strict with parallel\.zero: the update has"):
        strict_cases.built(sections, {"data": 2}, 2)


@pytest.mark.parametrize(("name", "fine"), [
    ("adamw", True), ("sgd", True), ("lion", True), ("adamax", True), ("adafactor", False),
    ("muon", False), ("novograd", False),
])  # fmt: skip
def test_updates_of_optax(name: str, fine: bool) -> None:
    params = {"w": jax.ShapeDtypeStruct((256, 256), jnp.float32)}
    transform = optax.with_extra_args_support(_optax(name))
    if fine:
        check_update(_without_extra(transform), params)
        return
    with pytest.raises(ConfigError, match="the update has"):
        check_update(_without_extra(transform), params)


def _optax(name: str) -> optax.GradientTransformation:
    return optax.contrib.muon(1e-3) if name == "muon" else getattr(optax, name)(1e-3)


def _without_extra(transform: Any) -> Any:
    def update(grads: Any, state: Any, params: Any, **extra: Any) -> Any:
        return transform.update(grads, state, params)

    return optax.GradientTransformationExtraArgs(transform.init, update)


def test_stage_2_says_that_it_is_stage_1() -> None:
    found = strict_cases.built(strict_cases.config("mlp", "adamw", 4, 2), {"data": 2}, 2)
    assert [told for told in found.notices if "saves no more memory than stage 1" in told]
