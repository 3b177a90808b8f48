"""Plans of models other than gpt: what the trace of a step says of them."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from runs import Jaxdist

from jaxdist.cost.flops import product_bytes
from jaxdist.experiment import build, load
from jaxdist.planner.explain import remedies
from jaxdist.planner.formulas.traced import OTHER_AXES, Traced
from jaxdist.planner.plan import ALL_NAMED, Plan
from jaxdist.planner.search import MEMORY, best, formulas_of, judge_plan, model_of, search
from jaxdist.planner.target import Places, parse_target
from jaxdist.planner.write import planned
from jaxdist.run.memory import bytes_per_device

ROOT = Path(__file__).parents[2]
MLP: dict[str, Any] = {
    "model": {"type": "mlp", "hidden": [64, 48]},
    "data": {
        "type": "synthetic", "kind": "images", "height": 8, "width": 8, "channels": 1,
        "classes": 10, "examples": 256, "heldout_examples": 0,
    },
    "optim": {"type": "adamw", "learning_rate": 1e-3},
    "train": {"steps": 2, "batch_size": 64},
}  # fmt: skip
CNN = MLP | {"model": {"type": "cnn", "channels": [8, 16], "hidden": 64}}
OWN = MLP | {
    "model": {"type": "import", "path": "test_traced:make", "args": {"width": 64}},
    "loss": {"type": "classification"},
    "sharding": {"params": {"*": "whole"}},
    "optim": {"type": "lamb", "learning_rate": 1e-3},
}


EXPERTS: dict[str, Any] = {
    "model": {
        "type": "gpt", "layers": 2, "embed": 64, "heads": 4, "mlp": 64, "tied_head": False,
        "experts": {"count": 8, "mlp": 128},
    },
    "data": {
        "type": "synthetic", "kind": "tokens", "vocab_size": 100, "window": 32,
        "heldout_examples": 0,
    },
    "optim": {"type": "adamw", "learning_rate": 1e-3},
    "train": {"steps": 2, "batch_size": 64},
}  # fmt: skip


class Own(nnx.Module):
    """Products in bfloat16 of parameters in float32."""

    def __init__(self, rngs: nnx.Rngs, width: int) -> None:
        self.first = nnx.Linear(64, width, rngs=rngs, dtype=jnp.bfloat16)
        self.norm = nnx.LayerNorm(width, rngs=rngs, dtype=jnp.bfloat16)
        self.last = nnx.Linear(width, 10, rngs=rngs, dtype=jnp.bfloat16)

    def __call__(self, image: jax.Array) -> jax.Array:
        x = image.reshape(image.shape[0], -1)
        return self.last(jax.nn.gelu(self.norm(self.first(x))))


def make(rngs: nnx.Rngs, width: int) -> nnx.Module:
    return Own(rngs, width)


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "test_traced", sys.modules[__name__])


def traced(values: dict[str, Any], tmp_path: Path) -> Traced:
    path = tmp_path / "config.yaml"
    path.write_text(json.dumps(values))
    document, config = load(path)
    found = model_of(config, document)
    assert isinstance(found, Traced)
    return found


@pytest.mark.parametrize(
    "values", [pytest.param(MLP, marks=pytest.mark.slow), CNN, OWN], ids=["mlp", "cnn", "own"]
)
@pytest.mark.parametrize(
    "plan",
    [
        Plan(data=8, zero=0, remat=None, microbatches=4),
        Plan(data=8, zero=1, remat=None),
        Plan(data=8, zero=3, remat=None),
        Plan(slices=2, data=4, zero=3, scope="ici", remat=None),
    ],
    ids=Plan.words,
)
@pytest.mark.every(3)
def test_state_is_the_experiments(values: dict[str, Any], plan: Plan, tmp_path: Path) -> None:
    check_state(values, plan, tmp_path)


@pytest.mark.parametrize(
    "plan",
    [
        Plan(data=2, expert=4, zero=3, remat=None),
        pytest.param(Plan(data=2, expert=4, zero=1, remat=None), marks=pytest.mark.slow),
        pytest.param(Plan(data=8, zero=3, remat=None), marks=pytest.mark.slow),
        Plan(data=1, expert=8, zero=0, remat=None),
    ],
    ids=Plan.words,
)
@pytest.mark.full
def test_state_of_experts_is_the_experiments(plan: Plan, tmp_path: Path) -> None:
    check_state(EXPERTS, plan, tmp_path)


def check_state(values: dict[str, Any], plan: Plan, tmp_path: Path) -> None:
    model = traced(values, tmp_path)
    path = tmp_path / "planned.yaml"
    path.write_text(json.dumps(planned(values, plan)))
    document, config = load(path)
    program = build(config, document, devices=jax.devices()).program
    assert formulas_of(model).refusal(plan) is None
    ours, state = formulas_of(model).memory(plan), program.state_shapes
    assert ours.parameters == bytes_per_device(state.params) + bytes_per_device(state.buffers)
    assert abs(ours.optimizer - bytes_per_device(state.opt_state)) <= 64  # its counters


@pytest.mark.full
def test_a_pass_keeps_factors_and_results_of_products(tmp_path: Path) -> None:
    mlp = traced(MLP, tmp_path)
    # Images, two hidden layers before and after their ReLU, and the logits: 64, 64, 48, 10.
    assert mlp.kept_bytes == 4 * (64 + 2 * 64 + 2 * 48 + 10)
    assert mlp.flops == mlp.step_flops == 2 * (2 * 64 * 64 + 3 * (64 * 48 + 48 * 10))
    assert (mlp.unit, mlp.tokens, mlp.narrow) == ("examples", 64, False)
    own = traced(OWN, tmp_path)
    assert own.kept_bytes == 2 * (64 + 2 * 64 + 10)
    assert own.narrow
    assert (own.param_bytes, own.sent_bytes, own.cast_bytes) == (4, 2, 2)


def test_bytes_of_products_count_each_array_once() -> None:
    def layers(x: jax.Array, kernels: jax.Array) -> tuple[jax.Array, jax.Array]:
        x, _ = jax.lax.scan(lambda x, kernel: (x @ kernel, None), x, kernels)
        return x @ x.T, x @ x.T

    shapes = jnp.ones((4, 8)), jnp.ones((3, 8, 8))
    scanned = 3 * 4 * (4 * 8 + 8 * 8 + 4 * 8)
    # x and its transpose, of which each product has one of its own, and two results.
    ends, program = 4 * (3 * 4 * 8 + 2 * 4 * 4), jax.make_jaxpr(layers)(*shapes)
    assert product_bytes(program) == scanned + ends
    assert product_bytes(program, scans=False) == ends


@pytest.mark.full
def test_what_crosses_the_border_of_a_scan_is_kept_as_it_is(tmp_path: Path) -> None:
    model = {"type": "bert", "embed": 16, "heads": 2, "compute_dtype": "bfloat16"}
    bert = EXPERTS | {"data": EXPERTS["data"] | {"masking": {}}}
    two, four = (traced(bert | {"model": model | {"layers": n}}, tmp_path) for n in (2, 4))
    assert two.ends_bytes == four.ends_bytes
    # For each token, the program of BERT-large on v5p keeps 8 arrays of the model's width in
    # bfloat16 and 6 in float32, 4 of the MLP's width, and the scores in both dtypes.
    token = 8 * 2 * 16 + 6 * 4 * 16 + 4 * 2 * 64 + 6 * 2 * 32
    assert (four.kept_bytes - two.kept_bytes) / 2 == pytest.approx(32 * token, rel=0.05)
    assert four.kept_bytes > 1.2 * four.factor_bytes


@pytest.mark.full
@pytest.mark.parametrize(
    ("config", "compiled"),
    [
        (
            "configs/bert/large.yaml",
            {("v5p:8x8x16", Plan(data=1024, zero=1, remat=None)): 2.042},
        ),
        (
            "benchmarks/tpu/mixtral_8x7b.yaml",
            {
                ("v5p:4x4x8", Plan(data=128, remat=None)): 8.424,
                ("v5p:4x4x8", Plan(data=32, expert=4, remat=None)): 18.408,
            },
        ),
        pytest.param(
            "benchmarks/tpu/deepseek_v3.yaml",
            {("v5p:8x8x8", Plan(data=512, remat=None)): 45.258},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["bert", "mixtral", "deepseek"],
)
def test_memory_is_near_that_of_the_compiler(
    config: str, compiled: dict[tuple[str, Plan], float]
) -> None:
    """Two layers, or four of which two have experts; `laid_out_bytes` gave the figures."""
    layers = ["model.layers=2"]
    if "deepseek" in config:
        layers = ["model.layers=4", "model.experts.every=2"]
    document, loaded = load(ROOT / config, layers)
    model = model_of(loaded, document)
    for (on, plan), gb in compiled.items():
        judged = judge_plan(model, plan, Places((1, plan.data, 1), ((), (), ())), parse_target(on))
        assert judged.memory.total / 1e9 == pytest.approx(gb, rel=0.05), plan.words()


# Memory of experts is in the test above, and the choice among plans in the two tests below.
@pytest.mark.slow
def test_the_best_plans_of_deepseek_v3_are_the_published_ones() -> None:
    """MaxText's configs: expert 256 with a capacity, and FSDP on 512 chips without one."""
    shape = ["data.window=8192", "model.experts.capacity_factor=1.0", "train.batch_size=1024"]
    document, config = load(ROOT / "benchmarks/tpu/deepseek_v3.yaml", shape)
    model = model_of(config, document)
    assert isinstance(model, Traced)
    assert model.experts is not None
    first = best(search(model, parse_target("v5p:8x8x4")), 5)
    assert any((one.plan.data, one.plan.expert) == (1, 256) for one in first)
    dropless = replace(model, batch=3072, experts=replace(model.experts, capacity=None))
    second = best(search(dropless, parse_target("v5p:8x8x8")), 5)
    assert any((one.plan.data, one.plan.zero) == (512, 3) for one in second)


@pytest.mark.full
def test_on_one_node_experts_stay_with_the_data(tmp_path: Path) -> None:
    """Measured: 64 experts on 8 H100 take 28% of the peak with FSDP, 16% on an axis of experts."""
    model = {
        "type": "gpt", "layers": 8, "embed": 2048, "heads": 16, "kv_heads": 4, "tied_head": False,
        "compute_dtype": "bfloat16", "remat": "full",
        "experts": {"count": 64, "top_k": 4, "mlp": 1024},
    }  # fmt: skip
    data = {**EXPERTS["data"], "vocab_size": 32000, "window": 4096}
    found = search(
        traced({**EXPERTS, "model": model, "data": data}, tmp_path), parse_target("h100:1x8")
    )
    plans = [one.plan for one in found.valid]
    assert plans[0].expert == 1
    assert {plan.expert for plan in plans} == {1, 2, 4, 8}
    for one in found.valid:
        assert one.seconds.expert > 0 if one.plan.expert > 1 else one.seconds.expert == 0
    assert "experts do not divide over axis expert" not in found.refused


@pytest.mark.full
def test_experts_divide_over_their_axis(tmp_path: Path) -> None:
    found = search(traced(EXPERTS, tmp_path), parse_target("v5e:4x4"))
    assert found.refused["experts do not divide over axis expert"] > 0
    assert {one.plan.expert for one in found.valid} == {1, 4}


def test_the_data_axis_alone_is_searched(tmp_path: Path) -> None:
    model = traced(MLP, tmp_path)
    found = search(model, parse_target("v5e:2x4"))
    assert {(one.plan.data, one.plan.tensor) for one in found.valid} == {(8, 1)}
    assert {one.plan.zero for one in found.valid} == {0, 1, 2, 3}
    assert {one.plan.microbatches for one in found.valid} == {1, 2, 4, 8}
    assert OTHER_AXES in found.refused
    assert found.count == len(found.valid) + sum(found.refused.values())
    for one in found.valid:
        assert min(one.seconds.parts().values()) >= 0
        assert 0 < one.mfu(model, parse_target("v5e:2x4"), masked=False) < 1


def test_what_is_too_large_is_told_without_an_axis_that_is_not_searched(tmp_path: Path) -> None:
    large = MLP | {"model": {"type": "mlp", "hidden": [65536, 65536]}}
    model = traced(large, tmp_path)
    found = search(model, parse_target("v5e:2x2"))
    assert not found.valid
    assert found.refused[MEMORY] == len(found.too_large)
    smallest = found.too_large[0]
    assert smallest.plan.zero == 3
    assert remedies(smallest, model)[-1].endswith("times as many chips.")
    assert not any("tensor" in line or "remat" in line for line in remedies(smallest, model))


def test_a_plan_is_written_and_trains(jaxdist: Jaxdist) -> None:
    jaxdist.config(MLP | {"sharding": {"rules": {"mlp": "tensor"}}, "mesh": {"data": -1}})
    done = jaxdist.here(
        "plan", "config.yaml", "--on", "v5e:2x4", "--explain", 1, "--write", "best.yaml"
    )
    assert done.code == 0, done
    said = " ".join(done.out.split())
    for part in ("mlp, 7,770 parameters", "step 64 examples", "The ranking is rough", OTHER_AXES):
        assert part in said
    document, config = load(jaxdist.folder / "best.yaml")
    program = build(config, document, devices=jax.devices()).program
    assert dict(program.layout.mesh.shape) == {"data": 8}


def test_names_of_dims_are_kept(tmp_path: Path) -> None:
    named = planned(OWN, Plan(data=8, remat=None))
    assert named["sharding"] == OWN["sharding"]
    assert "remat" not in named["model"]


@pytest.mark.needs_libtpu
@pytest.mark.full  # the same path as gpt's in test_command
def test_the_compiler_is_asked(jaxdist: Jaxdist) -> None:
    jaxdist.config(CNN)
    done = jaxdist("plan", "config.yaml", "--on", "v5e:2x2", "--top", 1, "--compile", "--json", "p")
    assert done.code == 0, done
    (target,) = json.loads((jaxdist.folder / "p").read_text())["targets"]
    assert target["plans"][0]["compiled"]["peak_bytes"] > 0


@pytest.mark.parametrize("remat", [ALL_NAMED, "minimal"])
def test_a_plan_for_blocks_without_a_gate_can_be_built(remat: str) -> None:
    values = planned(
        {
            "model": {"type": "gpt", "layers": 1, "embed": 16, "heads": 2, "mlp_type": "gelu"},
            "data": {"type": "synthetic", "kind": "tokens", "window": 8, "heldout_examples": 0},
            "optim": {"type": "adamw", "learning_rate": 1e-3},
            "train": {"steps": 1, "batch_size": 8},
        },
        Plan(data=8, remat=remat),
    )
    document, config = load(values)
    program = build(config, document).program
    jax.eval_shape(program.train, program.state_shapes, program.batch)
