"""The types of mixtures of experts: the contract of their exchange, and trainers that break it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from benchmarks.prove.faults import PLANS, Fault
from benchmarks.prove.mutations import planted
from jaxdist.config import Document, validate
from jaxdist.experiment import ExperimentConfig, build
from jaxdist.hlo.source.marks import gives, takes
from jaxdist.mesh import MeshConfig, build_mesh
from jaxdist.models.feed_forward.config import ExpertsConfig
from jaxdist.models.feed_forward.mixture import INTO, OUT, Experts
from jaxdist.models.feed_forward.products import Loop
from jaxdist.models.feed_forward.router import corrected, route
from jaxdist.parity.weighted import with_weights
from jaxdist.proofs.types.check import Typed, check_types
from jaxdist.proofs.types.program import types_of
from jaxdist.sharding import ShardingConfig, make_layout

BOTH = ("data", "expert")
ROWS, WHOLE, OWN = PartitionSpec(BOTH), PartitionSpec(), PartitionSpec("expert")
FIRST = PartitionSpec("d")
NAMES = ["router", "bias", "gate", "up", "down"]
SETTINGS = ExpertsConfig(count=4, top_k=2, bias_rate=0.01, capacity_factor=1.5)


def trained(fault: str = "") -> Typed:
    """The types of a step of a layer of experts that sums its gradients by itself."""
    mesh = build_mesh(MeshConfig.model_validate({"data": 2, "expert": 2}), jax.devices()[:4])
    layout = make_layout(ShardingConfig(experts="padded"), mesh)

    @partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(WHOLE, WHOLE, OWN, OWN, OWN, ROWS, ROWS),
        out_specs=(WHOLE, WHOLE, OWN, OWN, OWN),
        check_vma=False,
    )
    def step(router: Any, bias: Any, *more: Any) -> Any:
        *kernels, x_BLD, weight_BL = more
        count = lax.psum(weight_BL.sum(), BOTH)

        def loss(router: Any, kernels: Any) -> Any:
            logits_BLE = x_BLD @ router
            choice, sums, load_BE = route(logits_BLE, bias, weight_BL, SETTINGS)
            pairs = zip((INTO, INTO, OUT), kernels, strict=True)
            y_BLD = layout.over_experts(
                Experts("swiglu", Loop()), x_BLD, choice.ids, choice.weights, *pairs, capacity=3
            )
            balance = sums[:, 0].sum() / (weight_BL.sum() if fault == "local count" else count)
            return ((y_BLD**2).sum(-1) * weight_BL).sum() / count + 0.01 * balance, load_BE.sum(0)

        (of_router, of_kernels), load_E = jax.grad(loss, (0, 1), has_aux=True)(router, kernels)
        load_E = load_E if fault == "local load" else lax.psum(load_E, BOTH)
        of_router = lax.psum(of_router, "data" if fault == "router" else BOTH)
        wrong = fault == "wrong axis"
        of_kernels = [lax.pmean(g, "expert") if wrong else lax.psum(g, "data") for g in of_kernels]
        return of_router, corrected(bias, load_E, 0.01), *of_kernels

    shapes = (6, 4), (4,), (4, 6, 5), (4, 6, 5), (4, 5, 6), (8, 3, 6), (8, 3)
    return check_types(jax.make_jaxpr(step)(*map(jnp.ones, shapes)), NAMES)


FAULTS = {
    "router": ({"router"}, {"expert"}, "a psum over 'expert' is missing"),
    "wrong axis": ({"gate", "up", "down"}, {*BOTH}, "sums over 'expert' rows that belong to"),
    "local count": ({"router"}, {*BOTH}, "divides by a partial sum over"),
    "local load": ({"bias"}, {*BOTH}, "takes sign of a partial sum over"),
}


def test_a_right_trainer_of_experts_is_proved():
    found = trained()
    assert (found.findings, dict(found.undecided), [*found.proved]) == ((), {}, NAMES)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_a_trainer_of_experts_is_reported_at_its_leaves(fault):
    leaves, axes, said = FAULTS[fault]
    found = trained(fault)
    assert {leaf for one in found.findings for leaf in one.leaves} == leaves
    assert {one.axis for one in found.findings} == axes
    assert any(said in one.message for one in found.findings)
    assert {one.where.partition(":")[0] for one in found.findings} <= {
        "test_expert_types.py", "router.py",
    }  # fmt: skip
    assert {*found.proved} == {*NAMES} - leaves


def contract(function: Callable[..., Any], into: PartitionSpec = FIRST, out: Any = None) -> Typed:
    """The types of a function over the axis d of an array [8, 4]."""
    mesh = Mesh(jax.devices()[:4], ("d",))
    specs = {"in_specs": into, "out_specs": into if out is None else out}
    whole = jax.shard_map(function, mesh=mesh, check_vma=False, **specs)
    return check_types(jax.make_jaxpr(whole)(jnp.ones((8, 4))), ["y"])


def test_a_contract_takes_what_it_states():
    def sent(x: jax.Array) -> jax.Array:
        turned = lax.ppermute(takes(x, {"d": 0}), "d", [(i, (i + 1) % 4) for i in range(4)])
        return gives(jnp.sort(turned, 0), {"d": 0})

    assert contract(sent).proved == ("y",)
    # Another dim, a copy on every device, and what did not come out of the contract.
    assert not contract(sent, PartitionSpec(None, "d")).proved
    assert not contract(sent, WHOLE).proved
    assert not contract(lambda x: gives(jnp.sort(x, 0), {"d": 0})).proved
    assert not contract(lambda x: sent(x) + jnp.sort(x, 0)).proved
    assert contract(lambda x: gives(takes(x, {"d": 0}), {"other": 0})).proved == ()
    (finding,) = contract(lambda x: sent(x.sum(0, keepdims=True))).findings
    assert "gives a contract a partial sum over 'd'" in finding.message


def test_the_gradient_of_a_whole_operand_is_a_term_of_a_sum():
    def gradient(x: jax.Array, *, summed: bool = True) -> jax.Array:
        def loss(w: jax.Array) -> jax.Array:
            rows = takes(x, {"d": 0}) * takes(w, {"d": None}).reshape(1, 4)
            return gives(jnp.sort(rows, 0), {"d": 0}).sum()

        found = jax.grad(loss)(jnp.ones(4))
        return lax.psum(found, "d") if summed else found

    assert contract(gradient, out=WHOLE).proved == ("y",)
    (finding,) = contract(partial(gradient, summed=False), out=WHOLE).findings
    assert "a psum over 'd' is missing" in finding.message


GPT = PLANS["pipeline"]
QUICK = "padded buffers, ZeRO and a bias"
PLANNED: dict[str, dict[str, Any]] = {
    "an exchange by rings": {"sharding": {"experts": "ring", "rules": {"embed": "expert"}}},
    QUICK: {
        "sharding": {"experts": "padded"},
        "parallel": {"reduce": {"type": "ring"}, "zero": {"stage": 1}},
        "model": {"bias_rate": 0.01, "capacity_factor": 1.5, "shared": 1},
    },
    "the hidden width in parts": {"mesh": {"expert": 2, "tensor": 2}},
    "no axis of experts": {"mesh": {"data": 4}, "parallel": {"reduce": {"type": "ring"}}},
    "stages": {"mesh": {"expert": 2, "stage": 2}, "model": {"bias_rate": 0.01}},
}


def planned(name: str, **sections: Any) -> Typed:
    """The types of a step of a small model with experts, with these sections."""
    given = PLANNED[name]
    experts = {"count": 4, "top_k": 2, "mlp": 8, **given.get("model", {})}
    sections = {
        **GPT,
        **sections,
        "model": {**GPT["model"], "experts": experts},
        "parallel": given.get("parallel", {}),
        "mesh": {**given.get("mesh", {"data": 2, "expert": 2}), "fake_devices": 4},
        "sharding": given.get("sharding", {}),
    }
    config = validate(Document(sections), ExperimentConfig)
    return types_of(build(config, devices=jax.devices()[:4]).program)


FULL = ("an exchange by rings", "stages")
"""The others have an exchange of these, on other axes."""


def shown(name: str) -> Any:
    marks = () if name == QUICK else pytest.mark.full if name in FULL else pytest.mark.slow
    return pytest.param(name, marks=marks)


@pytest.mark.full
@pytest.mark.parametrize("name", [shown(name) for name in PLANNED])
def test_a_plan_with_experts_is_proved(name):
    found = planned(name)
    assert (found.findings, dict(found.undecided)) == ((), {})
    assert set(found.proved) == set(found.outputs) != set()


@pytest.mark.full
def test_a_penalty_over_a_local_count_is_reported_at_the_router():
    was = 'penalty = experts.balance * totals["balance_loss"]'
    becomes = f"{was} / weight"
    fault = Fault("count", "models/feed_forward/measure.py", was, becomes, "", ())
    with planted(fault):
        (finding, *_) = planned("no axis of experts", data=with_weights(GPT["data"])).findings
    assert "divides by a partial sum over 'data'" in finding.message
    assert finding.where.startswith("measure.py:")
    assert "state/params/blocks/mlp/router" in finding.leaves
