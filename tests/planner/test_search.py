"""The search: what it finds, what it refuses and why, and the laws of its times."""

from __future__ import annotations

import dataclasses
import statistics
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.planner.cases import PUBLISHED, drawn
from benchmarks.planner.report import judged, kendall_tau
from jaxdist.errors import ConfigError
from jaxdist.planner.explain import remedies
from jaxdist.planner.formulas.context import context_refusal
from jaxdist.planner.formulas.decoder import plan_refusal, ticks_of
from jaxdist.planner.memory import share
from jaxdist.planner.model import Decoder
from jaxdist.planner.plan import KEPT, Plan
from jaxdist.planner.search import (
    MEMORY,
    best,
    judge_plan,
    judged_of,
    least_chips,
    no_plan,
    search,
)
from jaxdist.planner.target import meshes, parse_target, wide_meshes
from jaxdist.planner.time import gather_seconds

SMALL = Decoder(8, 1024, 8, 8, 128, 4096, vocab=32000, window=1024, batch=32, tied=False)
LARGE = Decoder(80, 8192, 64, 8, 128, 28672, vocab=32000, window=4096, batch=64, tied=False)


@pytest.fixture(scope="module")
def found():
    return search(SMALL, parse_target("v5e:2x4"))


def test_plans_are_sorted_fit_and_are_counted(found) -> None:
    times = [one.seconds.total for one in found.valid]
    assert times == sorted(times)
    assert all(one.fits and plan_refusal(SMALL, one.plan) is None for one in found.valid)
    assert found.count == len(found.valid) + sum(found.refused.values())
    assert found.refused.get(MEMORY, 0) == len(found.too_large)
    assert all(one.plan.devices == 8 for one in found.valid)


def test_the_best_have_none_that_another_beats_in_both(found) -> None:
    top = best(found, 5)
    assert top[0] == found.valid[0]
    for number, one in enumerate(top):
        for faster in top[:number]:
            assert faster.places != one.places or one.memory.total < faster.memory.total


def test_parts_add_up_and_none_is_negative(found) -> None:
    for one in found.valid[::20]:
        for parts, total in (
            (one.seconds.parts(), one.seconds.total),
            (one.memory.parts(), one.memory.total),
        ):
            assert min(parts.values()) >= 0
            assert sum(parts.values()) == pytest.approx(total)


def test_a_small_model_is_fastest_without_recomputing(found) -> None:
    plan = found.valid[0].plan
    assert (plan.stage, plan.tensor) == (1, 1)
    assert plan.remat in ("minimal", "all_named")


def test_published_runs_are_predicted_within_an_eighth_and_mostly_within_a_twentieth() -> None:
    errors = {}
    for row in PUBLISHED:
        target = parse_target(row.topology, row.slices)
        ours = judged(row).mfu(row.model, target, masked=row.whole)
        errors[row.name, row.topology] = abs(ours / row.mfu - 1)
    assert {row: error for row, error in errors.items() if error > 0.12} == {}
    assert statistics.median(errors.values()) <= 0.05


def test_attention_that_is_kept_is_not_computed_again() -> None:
    target = parse_target("v6e:2x4")
    places = next(one for one in meshes(target) if one.sizes == (1, 8, 1))
    again, kept = (
        judge_plan(SMALL, Plan(data=8, remat=remat), places, target).seconds
        for remat in ("full", "save_attention")
    )
    assert kept.recomputed < again.recomputed
    assert kept.attention == again.attention


@pytest.mark.parametrize(
    ("on", "passes"), [("v5e:4x4", 2 * 0.2 + 2), ("v6e:4x4", 2 + 2), ("v5p:4x4x1", 2 + 1),
                       ("v5p:2x2x4", 2 + 2), ("tpu7x:2x2x2", 2 * 0.5 + 1)],
)  # fmt: skip
def test_gathers_and_sums_of_a_layer_are_waited_for_as_libtpu_makes_them(on, passes) -> None:
    """Two gathers, and a reduce-scatter or, as two of them, a whole sum."""
    target = parse_target(on)
    count = target.devices
    places = next(one for one in meshes(target) if one.sizes == (1, count, 1))
    model = dataclasses.replace(LARGE, batch=count)
    once = gather_seconds(target, places.dims[1], count, share(model, Plan(data=count)).layer * 2)
    waits = judge_plan(model, Plan(data=count), places, target).seconds.data
    assert waits == pytest.approx(model.layers * passes * once)


def test_a_ring_costs_what_its_sums_pass_through_memory() -> None:
    """A device multiplies as much with axis tensor as without, as fast where no table says."""
    target = parse_target("h100:1x8")
    alone, ring = (
        judge_plan(
            LARGE, Plan(data=8 // tensor, tensor=tensor),
            next(one for one in meshes(target) if one.sizes == (1, 8 // tensor, tensor)), target,
        ).seconds
        for tensor in (1, 8)
    )  # fmt: skip
    assert ring.products == pytest.approx(alone.products)
    # Seven of eight pieces of a block's results, and of gradients of its input: read twice and
    # written once. Beside them sums of two parts of the three kernels' gradients.
    tokens = LARGE.batch * LARGE.window
    sums = 2 * 3 * tokens * 7 / 8 * LARGE.embed + 3 * 3 * LARGE.embed * LARGE.mlp / 8
    rate = target.device.memory_bytes_per_second
    assert ring.elements - alone.elements == pytest.approx(LARGE.layers * 2 * sums / rate)


@given(st.sampled_from(list(KEPT)), st.sampled_from([1, 2, 4]))
def test_a_slower_network_is_never_faster(remat: str, count: int) -> None:
    plan = Plan(slices=2, data=8, remat=remat, microbatches=count)
    target = parse_target("v5e:2x4", 2)
    places = next(one for one in meshes(target) if one.sizes == (1, 8, 1))
    slow = dataclasses.replace(
        target.device, slow=dataclasses.replace(target.device.slow, bytes_per_second=1e8)
    )
    slower = dataclasses.replace(target, device=slow)
    assert (
        judge_plan(SMALL, plan, places, target).seconds.slow
        < judge_plan(SMALL, plan, places, slower).seconds.slow
    )


def test_state_in_a_slice_spares_the_slow_network() -> None:
    target = parse_target("v5e:16x16", 4)
    places = next(one for one in meshes(target) if one.sizes == (1, 256, 1))
    model = dataclasses.replace(LARGE, batch=1024)
    apart = judge_plan(model, Plan(slices=4, data=256, scope="ici"), places, target)
    over = judge_plan(model, Plan(slices=4, data=256), places, target)
    assert apart.seconds.slow < over.seconds.slow
    assert apart.memory.total > over.memory.total


def test_a_window_of_attention_takes_less_of_its_time() -> None:
    target = parse_target("v5e:2x4")
    places = next(one for one in meshes(target) if one.sizes == (1, 8, 1))
    long = dataclasses.replace(SMALL, window=8192)
    times = [
        judge_plan(
            dataclasses.replace(long, span=span), Plan(data=8), places, target
        ).seconds.attention
        for span in (1, 1024, 4096, 8192, None)
    ]
    assert times == sorted(times)
    assert times[0] < times[1] < times[2] < times[3]
    # Positions that attend to themselves alone: one block of 8 (or 16) in each row, of 36 (or 136).
    assert times[0] == pytest.approx(times[4] * 8 / 36, rel=0.5)
    assert times[3] == times[4]


@pytest.mark.parametrize(("on", "slower"), [("v5e:2x4", 1.0), ("h100:1x8", 9.9e14 / 6.7e13)])
def test_products_of_float32_are_those_of_bfloat16_on_tpus_alone(on: str, slower: float) -> None:
    target = parse_target(on)
    places = next(one for one in meshes(target) if one.sizes == (1, 8, 1))
    wide = dataclasses.replace(SMALL, narrow=False)
    narrow, other = (judge_plan(m, Plan(data=8), places, target).seconds for m in (SMALL, wide))
    assert other.products == pytest.approx(slower * narrow.products)
    assert other.elements > narrow.elements


def test_a_pipeline_waits_less_with_more_microbatches() -> None:
    target = parse_target("v5e:2x4")
    places = next(one for one in meshes(target) if one.sizes == (4, 2, 1))
    share = []
    for count in (4, 8, 16):
        plan = Plan(stage=4, data=2, zero=1, microbatches=count, schedule="1f1b")
        assert ticks_of(plan) is not None
        seconds = judge_plan(SMALL, plan, places, target).seconds
        share.append(seconds.bubble / seconds.total)
    assert share == sorted(share, reverse=True)


@pytest.mark.parametrize(
    ("plan", "why"),
    [
        (Plan(data=3), "batch does not divide"),
        (Plan(tensor=16, data=1, zero=0), "heads does not divide"),
        (Plan(stage=3, data=1, zero=0, schedule="1f1b", microbatches=4), "layers do not divide"),
        (Plan(stage=8, data=1, zero=0, schedule="1f1b", microbatches=4), "fewer microbatches"),
        (Plan(stage=2, data=2, zero=3, schedule="1f1b", microbatches=4), "ZeRO 3 in a pipeline"),
        (Plan(data=1, zero=3), "with a single replica"),
        (Plan(data=2, zero=3, bfloat16_reduction=True), "compute dtype already"),
    ],
)
def test_what_is_no_plan_says_why(plan: Plan, why: str) -> None:
    assert why in str(plan_refusal(SMALL, plan))


@pytest.mark.full
def test_where_nothing_fits_the_least_chips_are_told() -> None:
    target = parse_target("v5e:2x2")
    nothing = search(LARGE, target)
    assert not nothing.valid
    chips = least_chips(LARGE, target)
    assert chips is not None
    assert chips > 64  # 12 bytes of 69 billion parameters over 16 GB
    told = str(no_plan(LARGE, target, nothing))
    assert f"{chips:,} chips would be enough" in told
    assert MEMORY in told


def test_a_shape_that_no_number_of_slices_makes_large_enough_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = parse_target("v5e:1x1")
    nothing = search(LARGE, target)
    monkeypatch.setattr("jaxdist.planner.search.MOST_SLICES", 1)
    told = str(no_plan(LARGE, target, nothing))
    assert told.endswith("no number of slices of v5e:1x1 is enough, but another shape might be")


def test_where_no_plan_is_valid_reasons_are_counted() -> None:
    odd = dataclasses.replace(SMALL, batch=7, heads=7, kv_heads=7, layers=7)
    target = parse_target("v5e:2x4")
    nothing = search(odd, target)
    error = no_plan(odd, target, nothing)
    assert isinstance(error, ConfigError)
    assert "is valid" in str(error)
    assert "batch does not divide" in str(error)


@pytest.mark.full
def test_a_plan_too_large_says_what_would_have_to_change() -> None:
    found = search(LARGE, parse_target("v5p:4x4x4"))
    number = len(found.valid) + 1
    one = judged_of(found, best(found, 5), number)
    assert not one.fits
    lines = remedies(one, LARGE)
    assert "does not fit" in lines[0]
    assert len(lines) > 1
    with pytest.raises(ConfigError, match="use a number from 1 to"):
        judged_of(found, (), found.count + 1)


def test_drawn_plans_are_valid_and_the_same_for_a_seed() -> None:
    first, again = (next(drawn(3)) for _ in range(2))
    assert first == again


def test_kendall_tau_of_orders() -> None:
    assert kendall_tau([1, 2, 3, 4], [2, 4, 6, 8]) == 1
    assert kendall_tau([1, 2, 3, 4], [8, 6, 4, 2]) == -1


@pytest.mark.parametrize("window", [3, 100, 129])
@pytest.mark.parametrize("topology", ["v5e:2x4", "h100:1x8"])
@pytest.mark.every(3)
def test_a_window_that_splash_attention_refuses_has_a_plan(topology: str, window: int) -> None:
    found = search(dataclasses.replace(SMALL, window=window), parse_target(topology))
    assert found.valid
    assert all(plan.seconds.attention > 0 for plan in found.valid)


@pytest.mark.full
def test_long_sequences_are_shared_and_short_ones_are_not() -> None:
    """A sequence of 131,072 tokens in Llama-3.1-8B's widths has too many activations for a chip."""
    long = Decoder(8, 4096, 32, 8, 128, 14336, vocab=128256, window=131072, batch=2, tied=False)
    target = parse_target("v5p:2x2x2")
    found = search(long, target)
    first = found.valid[0]
    assert first.plan.context > 1
    # Axis tensor may split the heads besides, with or without a pipeline.
    three = [one for one in found.valid if min(one.plan.context, one.plan.tensor) > 1]
    assert three[0].seconds.total < 1.1 * first.seconds.total
    sharding = {one.plan.stage: one.plan.settings()["sharding"] for one in three}
    assert sharding[2] == {"rules": {"residual_seq": "tensor"}}
    assert sharding[1] == {"rules": {"residual_seq": "tensor", "embed": "context"}}
    assert first.plan.settings()["sharding"] == {"rules": {"embed": "context"}}
    assert first.plan.mesh()["context"] == first.plan.context
    assert 0 < first.seconds.context < first.seconds.attention
    short = dataclasses.replace(long, window=4096, batch=64)
    assert all(one.plan.context == 1 for one in search(short, target).valid)


@pytest.mark.full
def test_the_best_plans_of_llama_405b_at_131072_tokens_combine_tensor_and_context() -> None:
    """The published run combines both with a pipeline, on GPUs (arXiv 2407.21783, table 4)."""
    widths = (128, 16384, 128, 8, 128, 53248)
    long = Decoder(*widths, vocab=128256, window=131072, batch=64, tied=False)
    top = best(search(long, parse_target("v5p:8x8x8")), 5)
    assert any((one.plan.tensor, one.plan.context) == (8, 64) for one in top)


@pytest.mark.slow
def test_the_best_plans_of_llama_405b_on_16384_gpus_contain_the_published_mesh() -> None:
    """Tensor 8 inside a host, and context 16, stage 16 and data 8 across hosts."""
    widths = (128, 16384, 128, 8, 128, 53248)
    long = Decoder(*widths, vocab=128256, window=131072, batch=128, tied=False)
    top = best(search(long, parse_target("h100:2048x8")), 5)
    mesh = {"stage": 16, "data": 8, "context": 16, "tensor": 8}
    assert mesh in [one.plan.mesh() for one in top]


def test_hosts_of_gpus_are_divided_among_stages_and_parts_of_sequences() -> None:
    """Axis tensor is the last axis, so that it connects the GPUs of a host."""
    target = parse_target("h100:4x8")
    sizes = {(one.sizes[0], one.slices, one.inner) for one in wide_meshes(target, context=True)}
    assert sizes == {(1, 2, 2), (1, 1, 4), (2, 2, 1), (2, 1, 2), (4, 1, 1)}
    assert not list(wide_meshes(parse_target("2xv5e:2x4"), context=True))
    model = dataclasses.replace(SMALL, batch=8)
    found = search(model, target)
    wide = next(one for one in found.valid if one.plan.wide and one.plan.slices == 2)
    assert wide.plan.mesh() == {"stage": 2, "data": 2, "tensor": 8}
    assert list(wide.plan.mesh())[-1] == "tensor"
    assert wide.plan.words().startswith("stage 2 x data 2 x tensor 8")
    assert wide.plan.devices == target.devices
    # Messages between stages cross the slow network.
    near = dataclasses.replace(wide.places, dims=((0,), (), (0,)))
    assert judge_plan(model, wide.plan, near, target).seconds.bubble < wide.seconds.bubble


@pytest.mark.parametrize(
    ("change", "plan", "reason"),
    [
        (
            {"window": 130},
            Plan(context=4, zero=3),
            "the sequence does not divide over axes context and tensor",
        ),
        ({"embed": 1026}, Plan(context=4, zero=3), "the width does not divide over axis context"),
    ],
)
def test_plans_that_share_sequences_are_refused_with_a_reason(
    change: dict[str, Any], plan: Plan, reason: str
) -> None:
    found = context_refusal(dataclasses.replace(SMALL, **change), plan)
    assert found is not None
    assert reason in found
