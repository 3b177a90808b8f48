"""The types of small programs, right and wrong, and of the steps of whole configs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from documents import ROOT, blocks
from flax import nnx
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from runs import DIGITS

from benchmarks.prove.faults import PLANS, faults
from benchmarks.prove.mutations import planted
from jaxdist.config import Document, validate
from jaxdist.cost.context import SequenceSplit
from jaxdist.errors import JaxdistError
from jaxdist.experiment import ExperimentConfig, build
from jaxdist.hlo.source.marks import begins, ends, enters, leaves
from jaxdist.mesh import MeshConfig, build_mesh
from jaxdist.models.attention.contract import Qkv
from jaxdist.models.attention.plain import of_jax
from jaxdist.models.attention.shared import attend_shared
from jaxdist.models.attention.splash import Splash
from jaxdist.models.feed_forward.swiglu import SwiGLU
from jaxdist.models.gpt import GptConfig
from jaxdist.optim.matrices import matrices_in, plan_matrices
from jaxdist.optim.muon import newton_schulz
from jaxdist.parallel.pipeline.executor.lower import lower
from jaxdist.parallel.pipeline.executor.ticks import NONE
from jaxdist.parallel.pipeline.executor.trial import mistake_of
from jaxdist.pipeline_schedules.one_f_one_b import one_f_one_b
from jaxdist.proofs import rule
from jaxdist.proofs.types import rules, walk
from jaxdist.proofs.types.check import Typed, check_types
from jaxdist.proofs.types.program import types_of
from jaxdist.sharding import ShardingConfig, make_layout

WHOLE, ROWS = PartitionSpec(), PartitionSpec("d")
COLUMNS = PartitionSpec(None, "d")
DEVICES = 4


def added(x: jax.Array, dims: tuple[int, ...]) -> jax.Array:
    """The sum over some dims, as one reduction of two arrays."""
    both = lambda left, right: [a + b for a, b in zip(left, right, strict=True)]  # noqa: E731
    return lax.reduce([x, x * 2], [jnp.float32(0)] * 2, both, dims)[1]


def typed(
    function: Callable[..., Any], *shapes: tuple[int, ...], into: Any = WHOLE, out: Any = WHOLE
) -> Typed:
    """The types of a function inside `shard_map` over the axis d; the specs are those given."""
    mesh = Mesh(jax.devices()[:DEVICES], ("d",))
    whole = jax.shard_map(function, mesh=mesh, in_specs=into, out_specs=out, check_vma=False)
    return check_types(jax.make_jaxpr(whole)(*(jnp.ones(shape) for shape in shapes)), ["y"])


def jaxdist_all_gather() -> jax.Array:
    """A part of a collective that remat computes early, which takes no operand."""
    return jnp.zeros(())


RIGHT: dict[str, tuple[Callable[..., Any], tuple[Any, ...], Any]] = {
    "a sum of rows": (lambda x: lax.psum(x.sum(0), "d"), (ROWS,), WHOLE),
    "a sum of rows after a product with merged rows": (
        lambda x: lax.psum((x.reshape(-1, 2) @ jnp.ones((2, 3))).reshape(-1, 2, 3).sum(0), "d"),
        (ROWS,),
        WHOLE,
    ),
    "a part of a collective without operands": (
        lambda x: x + jax.jit(jaxdist_all_gather)(),
        (ROWS,),
        ROWS,
    ),
    "rows times equal values from a buffer": (
        lambda x: (
            x
            * lax.dynamic_update_slice(
                jnp.zeros((2, *x.shape)), jnp.full((1, *x.shape), 3.0), (1, 0, 0)
            ).max(0)
        ),
        (ROWS,),
        ROWS,
    ),
    "rows stay rows": (lambda x: jnp.tanh(x) * 2, (ROWS,), ROWS),
    "a product that contracts rows": (lambda x: lax.psum(x.T @ x, "d"), (ROWS,), WHOLE),
    "a mean of equal means": (lambda x: lax.pmean(x.mean(0), "d"), (ROWS,), WHOLE),
    "an all-gather": (
        lambda x: lax.all_gather(x, "d", tiled=True).max(0),
        (ROWS,),
        WHOLE,
    ),
    "a maximum": (lambda x: lax.pmax(x.max(0), "d"), (ROWS,), WHOLE),
    "a reduce-scatter": (
        lambda x: lax.psum_scatter(x.sum(0), "d", tiled=True),
        (ROWS,),
        ROWS,
    ),
    "a sum of rows as a reduction of two arrays": (
        lambda x: lax.psum(added(x, (0,)), "d"),
        (ROWS,),
        WHOLE,
    ),
    "a reduction of two arrays within rows": (lambda x: added(x, (1,)), (ROWS,), ROWS),
    "a norm of the sum of its shards": (
        lambda x: jnp.sqrt(lax.psum(jnp.sum(x * x), "d")),
        (ROWS,),
        WHOLE,
    ),
}
WRONG: dict[str, tuple[Callable[..., Any], tuple[Any, ...], Any, str]] = {
    "a sum that nobody takes": (lambda x: x.sum(0), (ROWS,), WHOLE, "psum over 'd' is missing"),
    "a sum taken twice": (
        lambda x: lax.psum(lax.psum(x.sum(0), "d"), "d") * 3,
        (ROWS,),
        WHOLE,
        "4 times too large",
    ),
    "a norm of a shard": (
        lambda x: lax.psum(jnp.sqrt(jnp.sum(x * x)), "d"),
        (ROWS,),
        WHOLE,
        "takes sqrt of a partial sum",
    ),
    "a norm of a shard by a reduction of two arrays": (
        lambda x: lax.psum(jnp.sqrt(added(x * x, (0, 1))), "d"),
        (ROWS,),
        WHOLE,
        "takes sqrt of a partial sum",
    ),
    "a weight of a device's rows": (
        lambda x: lax.psum(x.sum() / (x > 0).astype(x.dtype).sum(), "d"),
        (ROWS,),
        WHOLE,
        "divides by a partial sum",
    ),
    "a regularizer that is added on each device": (
        lambda x: lax.psum(x.sum() + jnp.float32(3), "d"),
        (ROWS,),
        WHOLE,
        "which each of the 4 devices would add",
    ),
    "rows of different examples": (
        lambda x: lax.psum(x, "d"),
        (ROWS,),
        WHOLE,
        "rows that belong to different examples",
    ),
    "equal random numbers for different rows": (
        lambda x: x * jax.random.normal(jax.random.key(0), x.shape),
        (ROWS,),
        ROWS,
        "equal random keys",
    ),
    "rows times a column that differs between rows": (
        lambda x: x * jnp.arange(2.0)[:, None],
        (ROWS,),
        ROWS,
        "positions that count from 0",
    ),
    "an error whose result a loop carries on": (
        lambda x: lax.fori_loop(0, 3, lambda _, total: jnp.sin(total), x.sum(0)),
        (ROWS,),
        WHOLE,
        "takes sin of a partial sum",
    ),
    "copies instead of shards": (
        lambda x: lax.psum(x.sum(0), "d"),
        (ROWS,),
        ROWS,
        "4 copies",
    ),
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_program_is_proved(name):
    function, into, out = RIGHT[name]
    found = typed(function, (8, 4), into=into, out=out)
    assert (found.findings, dict(found.undecided), found.proved) == ((), {}, ("y",))


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_program_is_reported_with_its_line(name):
    function, into, out, said = WRONG[name]
    (finding,) = typed(function, (8, 4), into=into, out=out).findings
    assert (finding.axis, finding.leaves) == ("d", ("y",))
    assert said in finding.message
    line = int(finding.where.removeprefix("test_prove_types.py:"))
    first = function.__code__.co_firstlineno
    assert first <= line <= first + 5


@pytest.mark.parametrize("begin", [0.0, 1.0])
def test_a_reduction_that_does_not_only_add_is_undecided(begin):
    joined = (lambda a, b: [a[0] + b[0]]) if begin else (lambda a, b: [a[0] * b[0]])
    product = partial(lax.reduce, init_values=[begin], computation=joined, dimensions=(0,))
    found = typed(lambda x: lax.psum(product([x])[0], "d"), (8, 4), into=(ROWS,))
    assert (found.findings, found.proved) == ((), ())
    assert "does not only add to zeros" in found.undecided["y"][0]


@pytest.mark.parametrize("use", [jnp.sum, lax.cummin])
def test_what_uses_a_local_maximum_is_undecided(use):
    """The maximum of the devices' sums, say, is not the sum of the maxima."""
    found = typed(lambda x: lax.pmax(use(x.max(0)), "d"), (8, 4), into=(ROWS,))
    assert (found.findings, found.proved) == ((), ())
    assert "a local maximum" in found.undecided["y"][0]


def test_an_operation_without_a_rule_is_undecided_and_not_proved():
    found = typed(lambda x: lax.psum(jnp.fft.fft(x).real, "d"), (8, 4), into=(ROWS,))
    assert (found.findings, found.proved) == ((), ())
    assert "fft has no rule" in found.undecided["y"][0]


def kernel(x: jax.Array) -> jax.Array:
    """Call foreign code that no rule covers."""
    return jax.ffi.ffi_call("mine", jax.ShapeDtypeStruct(x.shape, x.dtype))(x)


def test_a_rule_can_be_added(monkeypatch):
    monkeypatch.setattr(rules, "RULES", dict(rules.RULES))
    monkeypatch.setattr(walk, "RULES", rules.RULES)

    def step(x: jax.Array) -> jax.Array:
        return lax.psum(kernel(x).sum(0), "d")

    before = typed(step, (8, 4), into=(ROWS,))
    assert "rule('ffi_call:mine')" in before.undecided["y"][0]
    rule("ffi_call:mine", rows=0)
    assert typed(step, (8, 4), into=(ROWS,)).proved == ("y",)
    summed = typed(lambda x: kernel(x.sum(0, keepdims=True)), (8, 4), into=(ROWS,))
    assert "gives ffi_call:mine a partial sum" in summed.findings[0].message
    wrong_dim = typed(kernel, (4, 8), into=(COLUMNS,), out=COLUMNS)
    assert "along a dim that is not 0" in wrong_dim.undecided["y"][0]
    rule("ffi_call:mine", like="tanh")
    assert typed(kernel, (4, 8), into=(COLUMNS,), out=COLUMNS).proved == ("y",)


def test_the_rules_of_the_guide(monkeypatch):
    monkeypatch.setattr(rules, "RULES", dict(rules.RULES))
    (block,) = blocks(ROOT / "docs/guides/prove-types.md", "python")
    exec(block, {})
    assert {"pallas_call:my_gelu", "ffi_call:my_attention"} < rules.RULES.keys()


@pytest.mark.parametrize(
    ("given", "said"),
    [({}, "one of the two"), ({"like": "tan_h"}, "did you mean 'tanh'")],
)
def test_a_rule_that_says_nothing_is_refused(given, said):
    with pytest.raises(JaxdistError, match=said):
        rule("mine", **given)


def test_values_that_are_stacked_are_named():
    mesh = Mesh(jax.devices()[:DEVICES], ("d",))

    @partial(jax.shard_map, mesh=mesh, in_specs=ROWS, out_specs=WHOLE, check_vma=False)
    def loss(x: jax.Array) -> jax.Array:
        return x.sum()

    def step(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return x * loss(x), jnp.stack([loss(x), jnp.float32(1)])

    found = check_types(jax.make_jaxpr(step)(jnp.ones((8, 4))), ["x", "metrics"])
    assert {leaf for finding in found.findings for leaf in finding.leaves} == {"metrics"}


def test_a_gradient_is_divided_among_the_devices_that_have_the_whole_result():
    """jax divides and sums it when it transposes a `shard_map` whose devices all do the same."""
    mesh = Mesh(jax.devices()[:DEVICES], ("d",))
    specs = {"in_specs": WHOLE, "out_specs": WHOLE, "check_vma": False}
    squares = jax.shard_map(lambda w: jnp.tanh(w * w), mesh=mesh, **specs)
    gradient = jax.make_jaxpr(jax.grad(lambda w: squares(w).sum()))(jnp.ones((8, 4)))
    found = check_types(gradient, ["w"])
    assert (found.findings, dict(found.undecided), found.proved) == ((), {}, ("w",))
    total = jax.shard_map(lambda g: lax.psum(g, "d") * 2, mesh=mesh, **specs)
    (finding,) = check_types(jax.make_jaxpr(lambda g: total(g / DEVICES))(1.0), ["g"]).findings
    assert "4 times too large" in finding.message


def test_an_error_in_a_value_that_no_output_needs_is_not_reported():
    def turn(carry: tuple[jax.Array, jax.Array], _: None) -> Any:
        rows, equal = carry
        return (rows, equal * jnp.arange(2.0)[:, None]), None

    def step(x: jax.Array, used: int) -> jax.Array:
        return lax.scan(turn, (x, x), None, 2)[0][used]

    specs = {"into": (ROWS,), "out": ROWS}
    assert typed(partial(step, used=1), (8, 4), **specs).findings
    found = typed(partial(step, used=0), (8, 4), **specs)
    assert (found.findings, found.proved) == ((), ("y",))


@pytest.mark.parametrize("wrong", [True, False])
def test_shards_that_are_taken_apart_outside_of_shard_map_are_judged(wrong):
    """A loop runs its body several times, and later runs must not hide what an earlier found."""
    mesh = Mesh(jax.devices()[:DEVICES], ("d",))
    into, inside = (WHOLE, lambda x: x) if wrong else (ROWS, jnp.linalg.inv)
    shards = jax.shard_map(inside, mesh=mesh, in_specs=into, out_specs=ROWS, check_vma=False)

    def turn(x: jax.Array, _: None) -> Any:
        return x + jnp.split(shards(x), 2)[0].sum(), None

    step = jax.make_jaxpr(lambda x: lax.scan(turn, x, None, 2)[0])(jnp.ones((8, 2, 2)))
    found = check_types(step, ["y"])
    assert bool(found.findings) == wrong
    assert bool(found.undecided) != wrong


def test_outside_of_shard_map_there_is_nothing_to_decide():
    found = check_types(jax.make_jaxpr(jnp.mean)(jnp.ones(3)), ["y"])
    assert (found.regions, found.outputs, found.findings) == (0, (), ())


def _config(sections: dict[str, Any]) -> ExperimentConfig:
    return validate(Document(sections), ExperimentConfig)


def step_types(sections: dict[str, Any]) -> Typed:
    """The types of the step of the digits' config with these sections."""
    program = build(_config({**DIGITS, **sections}), devices=jax.devices()[:DEVICES]).program
    return types_of(program)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_step_of_zero_is_proved(stage):
    found = step_types(
        {
            "mesh": {"data": DEVICES},
            "parallel": {"reduce": {"type": "ring"}, "zero": {"stage": stage}},
        }
    )
    assert (found.findings, dict(found.undecided)) == ((), {})
    assert set(found.proved) == set(found.outputs)
    assert any("kernel" in name for name in found.proved)


PLANNED: dict[str, dict[str, Any]] = {
    "a pipeline": PLANS["pipeline"],
    "interleaved stages": {
        **PLANS["pipeline"],
        "model": {**PLANS["pipeline"]["model"], "layers": 4},
        "parallel": {"pipeline": {"schedule": {"type": "interleaved", "chunks": 2}}},
    },
    "attention over shared sequences": {
        **PLANS["pipeline"],
        "model": {**PLANS["pipeline"]["model"], "isolate_documents": True},
        "mesh": {"data": 2, "context": 2, "fake_devices": 4},
        "sharding": {"context": "ring"},
        "parallel": {"reduce": {"type": "ring"}},
    },
    "attention over shared sequences and heads": {
        **PLANS["pipeline"],
        "mesh": {"context": 4, "fake_devices": 4},
        "sharding": {"context": "ring_ulysses"},
        "parallel": {},
    },
    "messages across a slow network": {
        **PLANS["networks"],
        "parallel": {"compression": {"type": "quantize", "axis": "data.dcn"}},
    },
    "few elements of each gradient": {
        **PLANS["ring"],
        "parallel": {"compression": {"type": "topk"}},
    },
    "strict sums in shards": {
        **PLANS["ring"],
        "parallel": {"deterministic": {"type": "strict", "shards": 8}, "zero": {"stage": 1}},
    },
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.full] * (n == "interleaved stages")) for n in PLANNED],
)
@pytest.mark.every(3)
def test_every_value_of_a_plan_is_proved(name):
    found = types_of(build(_config(PLANNED[name]), devices=jax.devices()[:4]).program)
    assert (found.findings, dict(found.undecided)) == ((), {})
    assert set(found.proved) == set(found.outputs) != set()


def test_an_update_of_matrices_with_one_row_raises_no_alarm():
    matrices = matrices_in((DEVICES, 1, 10), ("layers", "mlp", "embed"))
    mesh = Mesh(jax.devices()[:DEVICES], ("d",))
    plan = plan_matrices([matrices], [ROWS], mesh, lambda size: 1.0)
    found = check_types(
        jax.make_jaxpr(lambda x: plan.apply(newton_schulz, [x])[0])(jnp.ones((DEVICES, 1, 10))),
        ["y"],
    )
    assert not found.findings


def test_splash_attention_to_gathered_keys_is_proved():
    split = SequenceSplit(("d",), DEVICES, order="zigzag")
    settings = {"window": None, "causal": True, "pieces": Splash(interpret=True).pieces}

    def attention_gradients(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
        segments = jnp.zeros(q.shape[:2], jnp.int32)
        given = partial(attend_shared, split, pytest.fail, **settings)
        return jax.grad(lambda *qkv: (given(*qkv, segments) ** 2).sum(), (0, 1, 2))(q, k, v)

    shapes = (1, 1024, 2, 128), (1, 1024, 1, 128), (1, 1024, 1, 128)
    specs = {"in_specs": COLUMNS, "out_specs": COLUMNS, "check_vma": False}
    mesh = Mesh(jax.devices()[:DEVICES], ("d",))
    whole = jax.shard_map(attention_gradients, mesh=mesh, **specs)
    found = check_types(jax.make_jaxpr(whole)(*map(jnp.ones, shapes)), ["q", "k", "v"])
    assert (found.findings, dict(found.undecided), found.proved) == ((), {}, ("q", "k", "v"))


@pytest.mark.parametrize("kind", ["swiglu", "gelu"])
def test_an_mlp_whose_products_overlap_with_a_ring_is_proved(kind):
    mesh = build_mesh(MeshConfig(tensor=DEVICES), jax.devices()[:DEVICES])
    rules: dict[str, Any] = {"residual_seq": "tensor"}
    layout = make_layout(ShardingConfig(rules=rules, collective_matmul=True), mesh)
    config = GptConfig(type="gpt", layers=1, heads=1, embed=6, mlp=8, mlp_type=kind)
    definition, weights = nnx.split(nnx.eval_shape(lambda: SwiGLU(config, nnx.Rngs(0), layout)))

    def gradients(weights: Any, x: jax.Array) -> Any:
        run = lambda w, x: (nnx.merge(definition, w)(x) ** 2).sum()  # noqa: E731
        return jax.tree.leaves(jax.grad(run, (0, 1))(weights, x))

    x = jax.ShapeDtypeStruct((2, 8, 6), jnp.float32)
    names = ["down", *["gate"] * (kind == "swiglu"), "up", "x"]
    found = check_types(jax.make_jaxpr(gradients)(weights, x), names)
    assert (found.findings, dict(found.undecided), [*found.proved]) == ((), {}, names)


def test_a_factored_moment_of_a_shard_is_reported_at_its_line_in_the_optimizer():
    optimizer = optax.scale_by_factored_rms(min_dim_size_to_factor=2)

    def update(gradient: jax.Array) -> jax.Array:
        return optimizer.update(gradient, optimizer.init(gradient), gradient)[0]

    found = typed(update, (8, 8), into=(ROWS,), out=ROWS).findings
    said = [one.message for one in found]
    assert any("partial sum" in one and "(in factorized.py:" in one for one in said)
    assert {one.where.partition(":")[0] for one in found} == {"test_prove_types.py"}


def tallied(x: jax.Array) -> jax.Array:
    """Add up, in a loop, the rows that the device's own table chooses."""
    turns = jnp.tile(jnp.eye(DEVICES, dtype=bool), (2, 1))[:, lax.axis_index("d")]

    def turn(total: jax.Array, row: Any) -> tuple[jax.Array, None]:
        mine, value = row
        return lax.cond(mine, lambda: total + value, lambda: total), None

    return lax.scan(turn, jnp.zeros(4), (turns, x))[0]


def test_a_tally_of_own_terms_is_summed_once():
    assert typed(lambda x: lax.psum(tallied(x), "d"), (8, 4)).proved == ("y",)
    (missing,) = typed(tallied, (8, 4)).findings
    assert "a psum over 'd' is missing" in missing.message
    (twice,) = typed(lambda x: lax.psum(lax.psum(tallied(x), "d"), "d"), (8, 4)).findings
    assert "4 times too large" in twice.message
    # A term of every device outside of the branch would be added by each.
    assert typed(lambda x: lax.psum(tallied(x) + x[0], "d"), (8, 4)).proved == ()


@pytest.mark.parametrize("op", ["whole", "twice"])
def test_what_begins_a_marked_sum_must_be_owed(op):
    def step(x: jax.Array) -> jax.Array:
        term = lax.psum(x.sum(0), "d") if op == "whole" else x.sum(0)
        total = ends(jnp.round(begins(term, "d", 0)), "d", 0)
        return total if op == "whole" else lax.psum(total, "d")

    (finding,) = typed(step, (8, 4), into=(ROWS,)).findings
    assert "4 times too large" in finding.message


def test_attention_on_a_single_head_of_keys_on_each_device_is_no_error():
    """The reshape of queries to [..., 1, group, head_dim] does not show that kv_heads are split."""

    def attended(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        q, k, v = (lax.all_to_all(x, "d", 2, 1, tiled=True) for x in (q, k, v))
        out = of_jax("xla", Qkv(q, k, v), None, causal=True)
        return lax.all_to_all(out, "d", 1, 2, tiled=True)

    def gradient(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return jax.grad(lambda q: (attended(q, k, v) ** 2).sum())(q)

    shapes = [(3, 8, heads, 2) for heads in (8, 4, 4)]
    sequence = PartitionSpec(None, "d")
    checked = partial(typed, into=(sequence,) * 3, out=sequence)
    found = checked(attended, *shapes)
    assert (found.findings, found.proved) == ((), ("y",))
    assert checked(gradient, *shapes).findings == ()


def test_an_operand_between_the_marks_of_a_shard_is_no_partial_sum():
    def step(x: jax.Array) -> jax.Array:
        turned = lax.ppermute(enters(x, "d", 0), "d", [(i, (i + 1) % DEVICES) for i in range(4)])
        return leaves(turned, "d", 0)

    assert typed(step, (8, 4), into=(ROWS,), out=ROWS).proved == ("y",)
    (finding,) = typed(lambda x: step(x.sum(0, keepdims=True)), (8, 4), into=(ROWS,)).findings
    assert "takes a partial sum over 'd' as if it were a shard" in finding.message


TABLES = [("forward", "input"), ("backward", "microbatch"), ("backward", "chunk")]


@pytest.mark.parametrize(("table", "entry"), TABLES)
def test_a_wrong_table_of_a_schedule_is_named(table, entry):
    ticks = lower(one_f_one_b(4, 4), activations="recompute")
    assert mistake_of(ticks) == ""
    tables = getattr(ticks, table)
    entries = getattr(tables, entry).copy()
    at = tuple(np.argwhere((tables.kind != NONE) & (entries > 0))[-1])
    entries[at] -= 1
    wrong = replace(ticks, **{table: tables._replace(**{entry: entries})})
    assert mistake_of(wrong).startswith(f"tick {at[0]}, stage {at[1]}: ")


def test_a_task_that_no_table_has_is_named():
    ticks = lower(one_f_one_b(2, 2), activations="stash")
    kinds = ticks.backward.kind.copy()
    kinds[tuple(np.argwhere(kinds != NONE)[-1])] = NONE
    wrong = replace(ticks, backward=ticks.backward._replace(kind=kinds))
    assert mistake_of(wrong).endswith("0 times")


@pytest.mark.full
def test_an_evaluation_in_stages_is_followed_along_the_data_axis():
    """A missing sum over the rows of all devices is reported at the values of the evaluation."""
    fault = next(one for one in faults() if one.file.endswith("model/pipeline.py"))
    sections = PLANS["pipeline"]
    with planted(fault):
        found = types_of(build(_config(sections), devices=jax.devices()[:4]).program)
    leaves = {leaf for finding in found.findings for leaf in finding.leaves}
    assert leaves == {"evaluation/loss/total", "evaluation/loss/weight"}
