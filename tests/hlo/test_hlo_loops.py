"""Loops, branches and calls: a program is worth the same as its unrolled self."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hlo_programs import only, ring, traffic
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxdist.hlo import ledger, ledger_of_text
from jaxdist.inspect.rows import by_kind


def mixed_layer(x, w):
    """A dot, a permute, an all-reduce, a reduce-scatter, an all-gather and an all-to-all."""
    x = jnp.tanh(lax.ppermute(x @ w, "tensor", ring(4)))
    x = jnp.tanh(lax.psum(x @ w, "data"))
    part = lax.psum_scatter(x, "tensor", tiled=True)
    x = lax.all_gather(jnp.sin(part), "tensor", tiled=True)
    return lax.all_to_all(x, "tensor", 0, 0, tiled=True), None


def mixed(unroll):
    return lambda w, x: lax.scan(mixed_layer, x, w, unroll=unroll)[0]


def nested(unroll):
    def outer(x, w):
        def inner(x, _):
            return jnp.tanh(lax.psum(x @ w, "tensor")), None

        x, _ = lax.scan(inner, lax.ppermute(x, "data", ring(2)), length=3, unroll=unroll)
        return x, None

    return lambda w, x: lax.scan(outer, x, w, unroll=unroll)[0]


def gradient(unroll):
    """Backward passes are scans too; of both arguments, or the last step would be cut."""

    def loss(w, x):
        return jnp.sum(nested(unroll)(w, x) ** 2)

    def add_up(w, x):
        by_w, by_x = jax.grad(loss, argnums=(0, 1))(w, x)
        return by_w.sum() + by_x.sum()

    return add_up


@pytest.mark.parametrize("build", [mixed, nested, gradient])
@pytest.mark.every(3)
def test_a_scan_counts_as_its_unrolled_self(program, build):
    p = program(data=2, tensor=4)
    arguments = (p.array(5, 128, 128), p.array(64, 128))
    # XLA:TPU may send the operand of a faster dot as bfloat16, in an unrolled program more often.
    with jax.default_matmul_precision("highest"):
        rolled, unrolled = (p.ledger(build(unroll), *arguments) for unroll in (False, True))
    assert max(one.times_high for one in rolled.collectives) >= 5
    assert {one.times_high for one in unrolled.collectives} == {1}
    assert traffic(rolled) == traffic(unrolled)
    assert rolled.flops_low == rolled.flops_high == unrolled.flops_high > 0
    assert rolled.unknown_loops == ()


def test_shardings_in_a_scan_count_as_unrolled(cpu_program):
    p = cpu_program(data=2, tensor=4)
    w = p.array(6, 256, 256, spec=P(None, "data", "tensor"))
    x = p.array(64, 256, spec=P("data", "tensor"))

    def loss(unroll):
        def total(w, x):
            x, _ = lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w, unroll=unroll)
            return (x**2).sum()

        return total

    rolled, unrolled = (ledger(p.compile(loss(u), w, x), p.mesh) for u in (False, True))
    assert traffic(rolled) == traffic(unrolled)
    assert rolled.flops_high == unrolled.flops_high


def count_up(x):
    return lax.fori_loop(3, 17, lambda _, x: lax.psum(x, "data"), x)


def count_up_in_threes(x):
    def turn(state):
        return state[0] + 3, lax.psum(state[1], "data")

    return lax.while_loop(lambda state: state[0] <= 40, turn, (jnp.int32(1), x))[1]


def count_down(x):
    def turn(state):
        return state[0] - 2, lax.psum(state[1], "data")

    return lax.while_loop(lambda state: state[0] > 0, turn, (jnp.int32(21), x))[1]


def bound_in_the_state(x):
    def turn(state):
        return state[0] + 1, state[1], lax.psum(state[2], "data")

    return lax.while_loop(lambda s: s[0] < s[1], turn, (jnp.int32(0), jnp.int32(9), x))[2]


def one_counter_for_two(x):
    def outer(_, x):
        return lax.fori_loop(0, 4, lambda _, x: lax.psum(x, "data"), x)

    return lax.fori_loop(0, 6, outer, x)


def without_trip_counts(text):
    return re.sub(r'"known_trip_count":\{"n":"\d+"\}', '"known_trip_count":{}', text)


@pytest.mark.parametrize(
    ("function", "times"),
    [
        (count_up, 14),
        (count_up_in_threes, 14),
        (count_down, 11),
        (bound_in_the_state, 9),
        (one_counter_for_two, 24),
    ],
)
def test_counts_are_read_from_the_loop(program, function, times):
    """XLA:TPU names no trip count; on CPU the same is reached by striking it out."""
    p = program(data=8)
    text = p.compile_local(function, p.array(16, 16)).as_text()
    for shown in (text, without_trip_counts(text)):
        found = ledger_of_text(shown, {"data": 8})
        assert sum(one.times_high for one in found.collectives) == times
        assert found.unknown_loops == ()


def until_small(x):
    return lax.while_loop(lambda x: x.sum() > 1, lambda x: lax.psum(x, "data") / 16, x)


def uneven(x):
    def turn(state):
        return state[0] * 2, lax.psum(state[1], "data")

    return lax.while_loop(lambda state: state[0] < 100, turn, (jnp.int32(1), x))[1]


def test_a_loop_of_unknown_length_is_named(program):
    p = program(data=8)
    found = p.ledger(until_small, p.array(16, 16))
    assert (only(found).times_low, only(found).times_high) == (0, 1)
    assert [name.rpartition("/")[2] for name in found.unknown_loops] == ["while"]


def squares(x):
    """Goes on for ever, wrapping around, which following it does not tell."""

    def turn(state):
        return state[0] * state[0] + 1, lax.psum(state[1], "data")

    return lax.while_loop(lambda state: state[0] != -1, turn, (jnp.int32(1), x))[1]


def test_a_counter_that_does_not_end_is_not_guessed(cpu_program):
    p = cpu_program(data=8)
    text = p.compile_local(squares, p.array(16, 16)).as_text()
    found = ledger_of_text(without_trip_counts(text), {"data": 8})
    assert len(found.unknown_loops) == 1
    assert not only(found).bounded


def test_branches_are_intervals(program):
    p = program(data=2, tensor=4)

    def either(x):
        def dear(x):
            return lax.psum(x @ x, "data") @ x

        def cheap(x):
            return lax.ppermute(x @ x, "tensor", ring(4))

        def turn(x, _):
            return lax.cond(x[0, 0] > 0, dear, cheap, lax.psum(x, "tensor")), None

        return lax.scan(turn, x, length=5)[0]

    found = p.ledger(either, p.array(64, 64))
    times = {(one.kind, one.axes): (one.times_low, one.times_high) for one in found.collectives}
    assert times == {
        ("all-reduce", ("tensor",)): (5, 5),
        ("all-reduce", ("data",)): (0, 5),
        ("collective-permute", ("tensor",)): (0, 5),
    }
    assert (found.flops_low, found.flops_high) == (5 * 2 * 64**3, 5 * 2 * 2 * 64**3)
    assert found.count("all-reduce") == 10


def test_a_switch_of_three(program):
    p = program(data=8)

    def choose(x):
        branches = [lambda x: x, lambda x: x @ x, lambda x: lax.psum(x, "data")]
        return lax.switch(x[0, 0].astype(jnp.int32), branches, x)

    found = p.ledger(choose, p.array(64, 64))
    assert (only(found).times_low, only(found).times_high) == (0, 1)
    assert (found.flops_low, found.flops_high) == (0, 2 * 64**3)


CALLED = """HloModule called, is_scheduled=true, num_partitions=4

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%twice (p: f32[8,8]) -> f32[8,8] {
  %p = f32[8,8]{1,0} parameter(0)
  %d = f32[8,8]{1,0} dot(%p, %p), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %r = f32[8,8]{1,0} all-reduce(%d), channel_id=1, replica_groups={{0,1},{2,3}}, use_global_device_ids=true, to_apply=%add, metadata={op_name="jit(f)/psum"}
}

ENTRY %main (x: f32[8,8]) -> f32[8,8] {
  %x = f32[8,8]{1,0} parameter(0)
  %once = f32[8,8]{1,0} call(%x), to_apply=%twice
  ROOT %again = f32[8,8]{1,0} call(%once), to_apply=%twice
}
"""  # noqa: E501  (HLO has one instruction a line)


def test_a_computation_called_twice():
    found = ledger_of_text(CALLED, {"data": 2, "tensor": 2})
    one = only(found)
    assert (one.name, one.axes, one.times_low, one.times_high) == ("r", ("tensor",), 2, 2)
    assert found.flops_low == 2 * 2 * 8**3


CARRIED = """HloModule carried, is_scheduled=true, num_partitions=2

%inner_body (s: (s32[], s32[], f32[8])) -> (s32[], s32[], f32[8]) {
  %s = (s32[], s32[], f32[8]{0}) parameter(0)
  %left = s32[] get-tuple-element(%s), index=0
  %step = s32[] get-tuple-element(%s), index=1
  %data = f32[8]{0} get-tuple-element(%s), index=2
  %next = s32[] subtract(%left, %step)
  %moved = f32[8]{0} collective-permute(%data), channel_id=1, source_target_pairs={{0,1},{1,0}}
  ROOT %state = (s32[], s32[], f32[8]{0}) tuple(%next, %step, %moved)
}

%inner_condition (t: (s32[], s32[], f32[8])) -> pred[] {
  %t = (s32[], s32[], f32[8]{0}) parameter(0)
  %now = s32[] get-tuple-element(%t), index=0
  %zero = s32[] constant(0)
  ROOT %more = pred[] compare(%now, %zero), direction=GT
}

%outer_body (u: (s32[], s32[], s32[], f32[8])) -> (s32[], s32[], s32[], f32[8]) {
  %u = (s32[], s32[], s32[], f32[8]{0}) parameter(0)
  %i = s32[] get-tuple-element(%u), index=0
  %length = s32[] get-tuple-element(%u), index=1
  %stride = s32[] get-tuple-element(%u), index=2
  %x = f32[8]{0} get-tuple-element(%u), index=3
  %first = (s32[], s32[], f32[8]{0}) tuple(%length, %stride, %x)
  %once = (s32[], s32[], f32[8]{0}) while(%first), condition=%inner_condition, body=%inner_body
  %stride_still = s32[] get-tuple-element(%once), index=1
  %y = f32[8]{0} get-tuple-element(%once), index=2
  %second = (s32[], s32[], f32[8]{0}) tuple(%length, %stride_still, %y)
  %twice = (s32[], s32[], f32[8]{0}) while(%second), condition=%inner_condition, body=%inner_body
  %z = f32[8]{0} get-tuple-element(%twice), index=2
  %j = s32[] add(%i, %stride_still)
  ROOT %all = (s32[], s32[], s32[], f32[8]{0}) tuple(%j, %length, %stride, %z)
}

%outer_condition (v: (s32[], s32[], s32[], f32[8])) -> pred[] {
  %v = (s32[], s32[], s32[], f32[8]{0}) parameter(0)
  %at = s32[] get-tuple-element(%v), index=0
  %end = s32[] constant(9)
  ROOT %on = pred[] compare(%at, %end), direction=LT
}

ENTRY %main (x0: f32[8]) -> f32[8] {
  %x0 = f32[8]{0} parameter(0)
  %none = s32[] constant(0)
  %seven = s32[] constant(7)
  %two = s32[] constant(2)
  %start = (s32[], s32[], s32[], f32[8]{0}) tuple(%none, %seven, %two, %x0)
  %loop = (s32[], s32[], s32[], f32[8]{0}) while(%start), condition=%outer_condition, body=%outer_body
  ROOT %out = f32[8]{0} get-tuple-element(%loop), index=3
}
"""  # noqa: E501  (HLO has one instruction a line)


def test_bounds_that_outer_and_earlier_loops_hand_on():
    """0, 2, 4, 6, 8 outside; 7, 5, 3, 1 inside, twice."""
    found = ledger_of_text(CARRIED, {"data": 2})
    assert only(found).times_low == only(found).times_high == 5 * 4 * 2
    assert found.unknown_loops == ()


@pytest.mark.parametrize(("end", "turns"), [(139_999, 70_000), (2**20, 2**19), (2**31 - 1, None)])
def test_a_loop_of_many_equal_steps_is_counted_up_to_a_million(end, turns):
    found = ledger_of_text(CARRIED.replace("constant(9)", f"constant({end})"), {"data": 2})
    assert len(found.unknown_loops) == (turns is None)
    assert only(found).times_high == (turns or 1) * 4 * 2


def test_a_count_that_xla_names_is_taken():
    outer = "body=%outer_body"
    named = CARRIED.replace(outer, outer + ', backend_config={"known_trip_count":{"n":"3"}}')
    assert only(ledger_of_text(named, {"data": 2})).times_high == 3 * 4 * 2


def doubling(x):
    """0, 1, 2, 4, ... 64: its first two steps are equal."""

    def turn(state):
        return jnp.maximum(1, 2 * state[0]), lax.psum(state[1], "data")

    return lax.while_loop(lambda state: state[0] < 64, turn, (jnp.int32(0), x))[1]


def collatz(x):
    def turn(state):
        i, x = state
        return jnp.where(i % 2 == 0, i // 2, 3 * i + 1), lax.psum(x, "data")

    return lax.while_loop(lambda state: state[0] != 1, turn, (jnp.int32(27), x))[1]


def by_way_of_another(x):
    """1, 2, 4, 7, 11, 16, 22: the condition reads one counter, which another moves."""

    def turn(state):
        i, step, x = state
        return i + step, step + 1, lax.psum(x, "data")

    start = (jnp.int32(1), jnp.int32(1), x)
    return lax.while_loop(lambda state: state[0] < 20, turn, start)[2]


def around(x):
    """Eight bits: 100, 125, -106."""

    def turn(state):
        return state[0] + jnp.int8(25), lax.psum(state[1], "data")

    return lax.while_loop(lambda state: state[0] > 0, turn, (jnp.int8(100), x))[1]


def a_hole(x):
    """Fails from 10 to 12, which powers of two jump over."""

    def turn(state):
        return state[0] + 1, lax.psum(state[1], "data")

    def goes_on(state):
        return (state[0] < 10) | (state[0] > 12)

    return lax.while_loop(goes_on, turn, (jnp.int32(0), x))[1]


@pytest.mark.parametrize(
    ("function", "times"),
    [(doubling, 7), (uneven, 7), (collatz, 111), (by_way_of_another, 6), (around, 2), (a_hole, 10)],
)
def test_what_does_not_move_by_equal_steps_is_followed(cpu_program, function, times):
    p = cpu_program(data=8)
    text = p.compile_local(function, p.array(16, 16)).as_text()
    found = ledger_of_text(without_trip_counts(text), {"data": 8})
    assert (only(found).times_high, found.unknown_loops) == (times, ())


def drawn(rng):
    """A loop of two counters at random, that ends after 40 turns at the latest; not its turns."""
    dtype = rng.choice([np.int8, np.uint8, np.int32])

    def number():
        return dtype(rng.integers(0, 9))

    def move():
        a, b = number(), number()
        return [
            lambda i, j: i + a,
            lambda i, j: i - a,
            lambda i, j: jnp.maximum(a, 2 * i),
            lambda i, j: jnp.minimum(i + b, j),
            lambda i, j: i * a + b,
            lambda i, j: jnp.where(i % 2 == 0, i + a, j),
            lambda i, j: (i ^ a) + b,
            lambda i, j: i // (a + 1) + j,
            lambda i, j: i + j,
            lambda i, j: (i << 1) | 1,
        ][rng.integers(10)]

    def holds():
        bound = dtype(rng.integers(0, 100))
        compare = [jnp.less, jnp.less_equal, jnp.greater, jnp.not_equal, jnp.greater_equal]
        compare = compare[rng.integers(5)]
        return [
            lambda i, j: compare(i, bound),
            lambda i, j: compare(i, bound) & (j != number_of_j),
            lambda i, j: compare(i, bound) | (j < 3),
            lambda i, j: compare(i + 1, j),
        ][rng.integers(4)]

    start, number_of_j = (number(), number()), number()
    moves, goes_on = (move(), move()), holds()

    def turn(state):
        n, i, j, x = state
        return n + 1, *(f(i, j) for f in moves), x @ x

    def run(x):
        state = (jnp.int32(0), *map(jnp.asarray, start), x)
        return lax.while_loop(lambda s: goes_on(s[1], s[2]) & (s[0] < 40), turn, state)

    return run


@pytest.mark.parametrize("seed", range(24))
def test_a_loop_at_random_is_counted_as_it_runs(seed):
    run = jax.jit(drawn(np.random.default_rng(seed)))
    x = jnp.eye(8)
    compiled = run.lower(x).compile()
    found = ledger_of_text(without_trip_counts(compiled.as_text()), {"data": 1})
    turns = int(compiled(x)[0])
    assert (found.flops_low, found.flops_high) == (turns * 2 * 8**3,) * 2
    assert found.unknown_loops == ()


def test_an_inner_loop_whose_length_is_the_outer_counter_is_counted_exactly(program):
    """0 + 1 + 2 + 3 + 4 turns, not up to 5."""
    p = program(data=8)

    def outer(i, x):
        return lax.fori_loop(0, i, lambda _, x: jnp.tanh(lax.psum(x, "data")), x)

    found = p.ledger(lambda x: lax.fori_loop(0, 5, outer, x), p.array(64, 128))
    assert sum(one.times_high for one in found.collectives) == 10
    assert sum(one.times_low for one in found.collectives) == 10
    assert found.unknown_loops == ()


def test_a_count_without_a_bound_has_no_upper_end_in_words(program):
    p = program(data=8)

    def again(state):
        return lax.psum(state[0], "data") / 2, state[1] - state[0].sum()

    found = p.ledger(
        lambda x: lax.while_loop(lambda s: s[1] > 0, again, (x, x.sum()))[0], p.array(64, 128)
    )
    assert {row.times for row in by_kind(found) if not row.bounded} == {"0 or more"}
