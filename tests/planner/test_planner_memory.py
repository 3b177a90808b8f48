"""Memory by formula: state to the byte as built, the rest by its laws."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxdist.errors import ConfigError
from jaxdist.experiment import build, load
from jaxdist.experiment.flops import step_flops
from jaxdist.models.bert import BertConfig
from jaxdist.planner.explain import remedies
from jaxdist.planner.formulas.decoder import plan_refusal, ticks_of
from jaxdist.planner.memory import kept_bytes, plan_memory, resting_bytes, share
from jaxdist.planner.model import Decoder, check_plannable, decoder_of
from jaxdist.planner.plan import KEPT, Plan
from jaxdist.planner.search import RESTING, judge_plan, search
from jaxdist.planner.target import meshes, parse_target
from jaxdist.planner.write import planned
from jaxdist.run.memory import bytes_per_device, copied_bytes

CONFIG = {
    "model": {
        "type": "gpt", "layers": 4, "embed": 64, "heads": 4, "kv_heads": 2, "mlp": 160,
        "compute_dtype": "bfloat16", "tied_head": False,
    },
    "data": {
        "type": "synthetic", "kind": "tokens", "vocab_size": 100, "window": 32,
        "heldout_examples": 0,
    },
    "optim": {"type": "adamw", "learning_rate": 1e-3},
    "train": {"steps": 1, "batch_size": 32},
}  # fmt: skip
MODEL = Decoder(8, 256, 8, 4, 32, 768, vocab=1024, window=128, batch=64, tied=False)
PLANS = st.builds(
    Plan,
    data=st.sampled_from([1, 2, 4, 8]),
    tensor=st.sampled_from([1, 2, 4]),
    zero=st.integers(0, 3),
    remat=st.sampled_from(sorted(KEPT)),
    microbatches=st.sampled_from([1, 2, 4]),
)


MUON = {**CONFIG, "optim": {"type": "muon", "learning_rate": 1e-3}}


def test_state_on_the_host_frees_memory_and_takes_the_time_of_its_copies() -> None:
    target = parse_target("v5e:2x4")
    model = dataclasses.replace(MODEL, embed=2048, mlp=8192, batch=8)
    places = next(places for places in meshes(target) if places.sizes == (1, 8, 1))
    plan = Plan(data=8, zero=1)
    there = dataclasses.replace(plan, offload=True)
    device, host = (judge_plan(model, one, places, target) for one in (plan, there))
    held = device.memory.optimizer
    assert host.memory.host == held
    assert 0 < device.memory.total - host.memory.total <= held
    assert host.memory.optimizer <= held / 2
    assert host.seconds.total - device.seconds.total == pytest.approx(2 * held / 1.6e10)
    found = search(dataclasses.replace(model, offload=True), target)
    assert {one.plan.offload for one in found.valid if one.plan.zero} == {True}
    assert not any(one.plan.offload for one in found.valid if not one.plan.zero)
    assert planned(CONFIG, there)["parallel"]["zero"] == {"stage": 1, "offload": True}
    with pytest.raises(ConfigError, match=r"the host's memory and a h100 is unknown.*false"):
        search(dataclasses.replace(model, offload=True), parse_target("h100:1x8"))


@pytest.mark.parametrize(
    "plan",
    [
        Plan(data=4, tensor=2, zero=1, resting=("blocks/*", "embedding"), microbatches=2),
        Plan(data=8, zero=3, resting=("blocks/*",)),
    ],
    ids=Plan.words,
)
@pytest.mark.every(2)
def test_parameters_on_the_host_are_those_of_the_experiment(plan: Plan, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(json.dumps(planned(CONFIG, plan)))
    document, config = load(path)
    model = decoder_of(config, document)
    assert model.resting == plan.resting
    program = build(config, document, devices=jax.devices()).program
    resting = resting_bytes(model, plan)
    assert resting.held == bytes_per_device(program.state_shapes.params, host=True) > 0
    assert resting.copied == copied_bytes(program)
    whole = plan_memory(model, plan)
    there = whole.resting(resting)
    assert whole.total - there.total == resting.held - resting.passing > 0
    assert (there.host, there.copied) == (resting.held, resting.copied)
    target = parse_target("v5e:2x4")
    found = search(model, target)
    assert all(one.plan.resting == plan.resting for one in found.valid if one.plan.zero_stage)
    assert found.refused[RESTING]
    places = next(p for p in meshes(target) if p.sizes == (1, plan.data, plan.tensor))
    seconds = judge_plan(model, plan, places, target).seconds
    assert seconds.host == pytest.approx(resting.copied / 1.6e10)


def test_parameters_on_the_host_are_split_over_axis_context_as_on_the_devices() -> None:
    on_host = frozenset(one.name for one in MODEL.tensors)
    model = dataclasses.replace(MODEL, resting=("*",), on_host=on_host)
    plan = Plan(data=2, context=4, zero=3, resting=("*",))
    assert resting_bytes(model, plan).held == plan_memory(model, plan).parameters


@pytest.mark.parametrize(
    "plan", [Plan(data=8, zero=3), Plan(data=4, tensor=2, zero=1)], ids=Plan.words
)
@pytest.mark.every(2)
def test_matrices_that_muon_updates_have_a_momentum_alone(plan: Plan, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(json.dumps(planned(MUON, plan)))
    document, config = load(path)
    model = decoder_of(config, document)
    program = build(config, document, devices=jax.devices()).program
    ours, found = (
        plan_memory(model, plan).optimizer,
        bytes_per_device(program.state_shapes.opt_state),
    )
    assert 0 <= found - ours <= 64  # its counters
    assert model.update_flops == step_flops(config, jax.devices()[0]).update


@pytest.mark.parametrize(
    "plan",
    [
        Plan(data=8, zero=0),
        Plan(data=8, zero=3),
        Plan(data=4, tensor=2, zero=1),
        Plan(data=4, tensor=2, zero=3),
        Plan(stage=2, data=4, zero=1, microbatches=4, schedule="1f1b"),
        Plan(slices=2, data=4, zero=3, scope="ici"),
        Plan(data=4, context=2, zero=3),
        Plan(data=1, context=8, zero=3),
    ],
    ids=Plan.words,
)
@pytest.mark.every(3)
def test_state_is_that_of_the_experiment_to_the_byte(plan: Plan, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(json.dumps(planned(CONFIG, plan)))
    document, config = load(path)
    model = decoder_of(config, document)
    assert plan_refusal(model, plan) is None
    program = build(config, document, devices=jax.devices()).program
    ours = plan_memory(model, plan, ticks_of(plan))
    assert ours.parameters == bytes_per_device(program.state_shapes.params)
    counters = 64  # of the optimizer: steps, and what the schedule counts
    assert 0 <= bytes_per_device(program.state_shapes.opt_state) - ours.optimizer <= counters


@pytest.mark.parametrize(
    "part",
    [
        {"freeze": ["embedding", "blocks/attention/*", "norm/*"]},
        {"lora": {"rank": 4, "alpha": 4, "targets": ["blocks/attention/*", "blocks/mlp/down"]}},
    ],
    ids=["freeze", "lora"],
)
@pytest.mark.parametrize(
    "plan", [Plan(data=4, tensor=2, zero=1), Plan(data=8, zero=3)], ids=Plan.words
)
@pytest.mark.every(3)
def test_frozen_parameters_have_no_state(plan: Plan, part: Any, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(json.dumps(planned({**CONFIG, "model": {**CONFIG["model"], **part}}, plan)))
    document, config = load(path)
    check_plannable(config, document)
    model = decoder_of(config, document)
    program = build(config, document, devices=jax.devices()).program
    ours = plan_memory(model, plan)
    assert ours.parameters == bytes_per_device(program.state_shapes.params)
    assert 0 <= bytes_per_device(program.state_shapes.opt_state) - ours.optimizer <= 64
    assert (
        ours.gradients < plan_memory(dataclasses.replace(model, frozen=frozenset()), plan).gradients
    )


def test_frozen_parameters_of_other_models_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(json.dumps(CONFIG))
    document, config = load(path)
    bert = BertConfig(type="bert", layers=1, embed=8, heads=2, freeze=("embedding",))
    with pytest.raises(ConfigError, match="plans of other models than gpt"):
        check_plannable(config.model_copy(update={"model": bert}), document)


def test_the_model_has_as_many_parameters_as_the_experiment(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(json.dumps(CONFIG))
    document, config = load(path)
    program = build(config, document, devices=jax.devices()[:1]).program
    count = sum(leaf.size for leaf in jax.tree.leaves(program.model.params))
    assert decoder_of(config, document).parameters == count


@given(PLANS)
def test_more_of_the_state_split_is_less_memory(plan: Plan) -> None:
    if plan.data == 1 or plan.zero == 3:
        return
    further = dataclasses.replace(plan, zero=plan.zero + 1)
    before, after = plan_memory(MODEL, plan), plan_memory(MODEL, further)
    state = [one.parameters + one.optimizer + one.gradients for one in (before, after)]
    # Of one microbatch XLA holds whole gradients until they are all there, under ZeRO 2 too.
    same = plan.zero == 1 and plan.microbatches == 1
    assert state[1] == state[0] if same else state[1] < state[0]
    assert share(MODEL, plan).shard <= share(MODEL, plan).whole


@given(PLANS)
def test_more_microbatches_keep_less(plan: Plan) -> None:
    further = dataclasses.replace(plan, microbatches=2 * plan.microbatches)
    assert plan_memory(MODEL, further).activations < plan_memory(MODEL, plan).activations
    assert plan_memory(MODEL, further).parameters == plan_memory(MODEL, plan).parameters


def test_remat_keeps_what_it_says() -> None:
    """Of one token: the block's input, and each activation that is named."""
    one = {name: kept_bytes(MODEL, Plan(remat=name), 1) / MODEL.window / 2 for name in KEPT}
    assert one["full"] == 256
    assert one["save_qkv"] == 256 + 256 + 128 + 128
    assert one["minimal"] == one["save_qkv"] + 256 + 2 * 768
    assert one["all_named"] == one["minimal"] + 256


def test_a_stash_takes_more_than_recomputing() -> None:
    plan = Plan(stage=4, data=1, zero=0, microbatches=8, schedule="1f1b")
    stash = dataclasses.replace(plan, stash=True)
    assert (
        plan_memory(MODEL, stash, ticks_of(stash)).activations
        > plan_memory(MODEL, plan, ticks_of(plan)).activations
    )


def test_gradients_lie_in_the_dtype_of_parameters_but_in_shards() -> None:
    """Whole ones of blocks in float32, those of shards in the compute dtype; sums in float32."""
    whole = share(MODEL, Plan(data=8, zero=0))
    blocks = whole.whole - whole.ends
    assert plan_memory(MODEL, Plan(data=8, zero=1)).gradients == 4 * blocks
    two = Plan(data=8, zero=1, microbatches=2)
    assert plan_memory(MODEL, two).gradients == 4 * blocks + 4 * whole.whole
    shard = share(MODEL, Plan(data=8, zero=3)).shard
    assert plan_memory(MODEL, Plan(data=8, zero=3)).gradients == 2 * shard


def test_a_backward_task_in_halves_leaves_more() -> None:
    plan = Plan(stage=4, data=2, zero=0, microbatches=8, schedule="1f1b")
    halves = dataclasses.replace(plan, schedule="zb_h1")
    one, other = (plan_memory(MODEL, p, ticks_of(p)).activations for p in (plan, halves))
    assert other > one
    full = dataclasses.replace(halves, remat="minimal")
    assert plan_memory(MODEL, full, ticks_of(full)).activations > other


def test_a_remedy_is_one() -> None:
    """From ZeRO 1 with one microbatch it is 3: 2 would hold as much."""
    target = parse_target("v5e:2x4")
    model = dataclasses.replace(MODEL, layers=144, embed=1024, mlp=4096)
    places = next(one for one in meshes(target) if one.sizes == (1, 8, 1))
    for zero, further in ((0, 1), (1, 3)):
        one = judge_plan(model, Plan(data=8, zero=zero), places, target)
        assert not one.fits
        assert any(line.startswith(f"ZeRO {further} splits more") for line in remedies(one, model))
