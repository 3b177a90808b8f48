"""Gradients sent as messages in a train step: every plan, its state, and what it refuses."""

import json
import math
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from built_optimizer import built_optimizer
from chosen import quick
from flax import nnx
from programs import place, shapes_of

from jaxdist.checkpoint.store import CheckpointStore
from jaxdist.hlo.ledger import ledger
from jaxdist.mesh import MeshConfig, build_mesh
from jaxdist.models.functional import functional
from jaxdist.models.loss import Mean
from jaxdist.optim.build import AdamWConfig
from jaxdist.parallel.plan import ParallelConfig, plan_exchange
from jaxdist.run.checkpoints import adapted
from jaxdist.sharding import ShardingConfig, make_layout, param_shardings
from jaxdist.train.assemble import assemble
from jaxdist.trees import flatten_with_names

ROWS, IN, OUT = 16, 12, 10
OPTIM = AdamWConfig(type="adamw", learning_rate=0.1, skip_nonfinite=True)
FLAT, TWO = {"data": 8}, {"data": {"dcn": 2, "ici": 4}}
ACROSS = {"axis": "data.dcn"}
ICI = {"scope": "ici", "whole_below": 16}
PLANS = {
    "flat": (FLAT, {}, {}),
    "flat with tensor": ({"data": 4, "tensor": 2}, {}, {}),
    "zero 1": (FLAT, {"zero": {"stage": 1, "whole_below": 16}}, {}),
    "zero 1 with tensor, ring": (
        {"data": 4, "tensor": 2},
        {"zero": {"stage": 1, "whole_below": 16}, "reduce": {"type": "ring"}},
        {},
    ),
    "two networks, flat": (TWO, {}, {}),
    "across": (TWO, {}, ACROSS),
    "across, zero 1": (TWO, {"zero": {"stage": 1, **ICI}}, ACROSS),
    "across, zero 2": (TWO, {"zero": {"stage": 2, **ICI}}, ACROSS),
    "across, zero 3": (TWO, {"zero": {"stage": 3, **ICI}}, ACROSS),
    "across, zero 3, tensor": (
        {"data": {"dcn": 2, "ici": 2}, "tensor": 2},
        {"zero": {"stage": 3, **ICI}},
        ACROSS,
    ),
}
FULL = pytest.mark.full
CODECS = {
    "sign": {"type": "sign", "block": 8},
    "int4": {"type": "quantize", "bits": 4, "block": 8},
    "topk": {"type": "topk", "fraction": 0.1},
    "lowrank": {"type": "lowrank", "rank": 1},
}


class Model(nnx.Module):
    """Two matrices and a vector; 9 inputs divide over no axis, where another one has the 16."""

    def __init__(self, rngs, inputs=9):
        key = rngs.params
        self.first = nnx.Param(jax.random.normal(key(), (inputs, 16)) / 4, dims=("embed", "mlp"))
        self.bias = nnx.Param(jnp.zeros(16), dims=("mlp",))
        self.last = nnx.Param(jax.random.normal(key(), (16, OUT)) / 4, dims=("mlp", "embed"))

    def __call__(self, x):
        hidden = x[:, : self.first.shape[0]] @ self.first[...] + self.bias[...][None]
        return jax.nn.tanh(hidden) @ self.last[...]


def squares(module, batch):
    each = jnp.square(module(batch["x"]) - batch["y"]).sum(-1)
    return {"loss": Mean((each * batch["weight"]).sum(), batch["weight"].sum())}


def rows(seed=0):
    x = np.random.default_rng(seed).normal(size=(ROWS, IN)).astype(np.float32)
    return {"x": x, "y": np.tanh(x[:, :OUT]) + 0.1}


def program(mesh, parallel, codec, *, inputs=9, microbatches=1, optim=OPTIM):
    parts = [p.values() if isinstance(p, dict) else [p] for p in mesh.values()]
    devices = jax.devices()[: math.prod(n for part in parts for n in part)]
    layout = make_layout(ShardingConfig(), build_mesh(MeshConfig.model_validate(mesh), devices))
    model = functional(partial(Model, inputs=inputs))
    whole = param_shardings(layout, model.params, model.dims)
    config = ParallelConfig.model_validate_json(json.dumps({**parallel, "compression": codec}))
    exchange, _ = plan_exchange(config, layout, model.params, model.dims, whole)
    optimizer = built_optimizer(optim, 9, model.params, model.dims)
    given = (model, squares, optimizer, layout, model.dims, shapes_of(layout, rows()))
    return assemble(*given, microbatches=microbatches, exchange=exchange)


def planned(name, codec, **settings):
    mesh, parallel, given = PLANS[name]
    return program(mesh, parallel, {**codec, **given}, **settings)


def gradients(found, state=None, seed=0):
    """The gradients, whole on the host, and the exchange's next state."""
    state = found.init() if state is None else state
    out = found.gradients(state, place(found, rows(seed)))
    own = jax.tree.map(lambda g, p: np.asarray(g)[tuple(map(slice, p.shape))],
                       out.grads, found.model.params)  # fmt: skip
    return own, out.exchange


@cache
def exact(inputs):
    return gradients(program(FLAT, {}, None, inputs=inputs))[0]


def close(ours, expected, **limits):
    for (name, x), y in zip(flatten_with_names(ours), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, err_msg=name, **limits)


def total(tree):
    return sum(np.asarray(leaf, np.float64).sum() for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=(FULL if i % 2 else ())) for i, n in enumerate(PLANS)]
)
@pytest.mark.every(3)
def test_what_loses_nothing_is_the_plain_gradient(name):
    codec = {"type": "whole", "error_feedback": False}
    found = planned(name, codec, microbatches=2 if "zero" in name else 1)
    close(gradients(found)[0], exact(9), rtol=2e-5, atol=2e-6)


INT8, INT4 = ({"type": "quantize", "bits": bits, "block": 64} for bits in (8, 4))
PLUS_PLUS = {
    "secondary": (TWO, {"zero": {"secondary": True}}),
    "secondary, ring": (TWO, {"reduce": {"type": "ring"}, "zero": {"secondary": True}}),
    "secondary, tensor": (
        {"data": {"dcn": 2, "ici": 2}, "tensor": 2},
        {"zero": {"secondary": True}},
    ),
    "gather int8": (FLAT, {"zero": {"gather_codec": INT8}}),
    "gather int8, secondary": (TWO, {"zero": {"gather_codec": INT8, "secondary": True}}),
    "reduce int4": (FLAT, {"compression": {**INT4, "error_feedback": False}}),
    "reduce int4 in two hops": (TWO, {"compression": {**INT4, "error_feedback": False}}),
    "reduce bfloat16, tensor": (
        {"data": {"dcn": 2, "ici": 2}, "tensor": 2},
        {"compression": {"type": "cast", "error_feedback": False}},
    ),
}


def plus_plus(name, **settings):
    mesh, parallel = PLUS_PLUS[name]
    zero = {"stage": 3, "whole_below": 16, **parallel.get("zero", {})}
    plan = {"reduce": {"type": "xla"}, **parallel, "zero": zero}
    return program(mesh, plan, plan.pop("compression", None), **settings)


SECOND = [name for name in PLUS_PLUS if name.startswith("secondary")]


@pytest.mark.parametrize("name", quick("secondary, tensor", of=SECOND, slow=True))
def test_a_second_copy_of_the_shards_changes_no_bit(name):
    mesh, parallel = PLUS_PLUS[name]
    plan = {"reduce": {"type": "xla"}, **parallel, "zero": {"stage": 3, "whole_below": 16}}
    plain = trained(program(mesh, plan, None, microbatches=2), 2)
    assert bits(trained(plus_plus(name, microbatches=2), 2)) == bits(plain)


@pytest.mark.parametrize("name", [name for name in PLUS_PLUS if "int" in name or "bf" in name])
@pytest.mark.every(3)
def test_messages_of_shards_are_near_what_they_stand_for(name):
    """As near as the codec is; and not the same, so that something was encoded."""
    found = plus_plus(name)
    ours, expected = gradients(found)[0], exact(9)
    for (leaf, x), y in zip(flatten_with_names(ours), jax.tree.leaves(expected), strict=True):
        error = np.linalg.norm(x - y) / np.linalg.norm(y)
        limit = {"gather": 0.05, "reduce": 0.2}[name.split()[0]]
        assert (error == 0 or leaf == "bias") if leaf == "bias" else 1e-5 < error < limit, leaf


def each_plan_and_each_codec():
    """Each codec on a plan; in full tests each plan too; all of both in the slow sweep."""
    for i, name in enumerate(PLANS):
        for j, codec in enumerate(CODECS):
            marks = pytest.mark.slow if (i + j) % len(CODECS) else FULL if i >= len(CODECS) else ()
            yield pytest.param(name, codec, marks=marks)


@pytest.mark.parametrize(("name", "codec"), [*each_plan_and_each_codec()])
@pytest.mark.every(3)
def test_what_is_not_in_the_gradient_is_kept(name, codec):
    """Sent plus kept is the gradient: of all senders, and of those who encode their sum again."""
    found = planned(name, CODECS[codec], inputs=12)
    grads, state = gradients(found)
    kept = total([(b.up, b.down) for group in state.groups for b in group.buckets])
    assert total(grads) + kept == pytest.approx(total(exact(12)), abs=2e-4)
    assert abs(kept) > 1e-3


SIGN = CODECS["sign"]


def bits(tree):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def trained(found, steps, state=None, begin=0):
    state = found.init() if state is None else state
    for step in range(begin, begin + steps):
        state, _ = found.train(state, place(found, rows(step)))
    return state


@pytest.mark.full
def test_zero_1_gets_the_same_bits():
    whole, shards = (planned(name, SIGN) for name in ("flat", "zero 1"))
    assert bits(gradients(whole)) == bits(gradients(shards))


@pytest.mark.full
def test_warm_up_sends_everything():
    found = planned("flat", {**SIGN, "warmup_steps": 2})
    plain = program(FLAT, {}, None)
    state = trained(found, 1)
    close(state.params, trained(plain, 1).params, rtol=1e-4, atol=1e-5)
    _, exchange = gradients(found, state)
    assert total([b.up for group in exchange.groups for b in group.buckets]) == 0
    later, _ = gradients(found, trained(found, 1, state, 1))
    values = np.unique(np.abs(later["first"].reshape(-1)).round(7))
    assert len(values) < 0.4 * later["first"].size  # one size a block, not one an element


@pytest.mark.parametrize(("name", "shard"), [("flat", 304), ("across", 76), ("across, zero 3", 76)])
def test_a_residual_is_as_large_as_what_a_device_sends(name, shard):
    """Across the slow network, a shard."""
    codec = {"type": "quantize", "block": 8}
    state = planned(name, codec).init().exchange
    (bucket,) = [b for group in state.groups for b in group.buckets if b.up]
    assert bucket.up["residual"].shape == (8, shard)
    assert len({s.device for s in bucket.up["residual"].addressable_shards}) == 8
    assert {s.data.shape for s in bucket.up["residual"].addressable_shards} == {(1, shard)}


@pytest.mark.full
def test_what_is_not_finite_is_skipped_and_enters_no_residual():
    found = planned("across, zero 3", SIGN)
    state = trained(found, 2)
    before, params = bits(state.exchange), bits(state.params)
    bad = rows(5)
    bad["x"][3, 2] = np.inf
    state, metrics = found.train(state, place(found, bad))
    assert (bits(state.exchange), bits(state.params)) == (before, params)
    assert dict(zip(found.metrics, metrics.tolist(), strict=True))["skipped_steps"] == 1


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A directory with a checkpoint of 8 devices after 3 steps, and the state."""
    directory = tmp_path_factory.mktemp("saved")
    state = trained(planned("flat", SIGN), 3)
    with CheckpointStore(directory, keep=1, keep_best=False, on_event=pytest.fail) as store:
        store.save(3, state, metadata={})
    return directory, state


def restored(directory, found, say=pytest.fail):
    with CheckpointStore(directory, keep=1, keep_best=False, on_event=pytest.fail) as store:
        return store.restore_as(adapted(found, say)).state


@pytest.mark.full
def test_a_run_goes_on_to_the_bit(saved):
    directory, old = saved
    found = planned("flat", SIGN)
    state = restored(directory, found)
    assert bits(state) == bits(old)
    assert bits(trained(found, 2, state, 3)) == bits(trained(found, 5))


@pytest.mark.parametrize(
    ("devices", "feedback"),
    [
        pytest.param(2, "classic", marks=pytest.mark.full),
        (8, "ef21"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((4, "classic"), (8, "classic"), (2, "ef21"), (4, "ef21"))
        ),
    ],
)
@pytest.mark.full
def test_another_number_of_devices_keeps_the_sums(devices, feedback, tmp_path):
    codec = {**SIGN, "error_feedback": {"type": feedback}}
    old = trained(program({"data": 4}, {}, codec), 2)
    with CheckpointStore(tmp_path, keep=1, keep_best=False, on_event=pytest.fail) as store:
        store.save(2, old, metadata={})
    found = program({"data": devices}, {}, codec)
    state = restored(tmp_path, found)
    pairs = [
        pair
        for one, two in zip(old.exchange.groups, state.exchange.groups, strict=True)
        for pair in zip(one.buckets, two.buckets, strict=True)
    ]
    for before, after in pairs:
        for one, two in zip(*(jax.tree.leaves(x.up) for x in (before, after)), strict=True):
            assert len(two) == devices
            np.testing.assert_allclose(two.sum(0), one.sum(0), rtol=1e-5, atol=1e-6)
        for field in ("down", "up_view"):  # end to end, with what fills up the last shard
            for one, two in zip(
                *(jax.tree.leaves(getattr(x, field)) for x in (before, after)), strict=True
            ):
                size = min(one.size, two.size)
                assert two.reshape(-1)[:size].tolist() == one.reshape(-1)[:size].tolist()
        assert [len(set(map(bytes, map(np.asarray, x)))) for x in jax.tree.leaves(after.down_view)
                ] == [1] * len(jax.tree.leaves(after.down_view))  # fmt: skip
    assert [*np.asarray(state.exchange.step)] == [2] * devices
    trained(found, 1, state, 2)


@pytest.mark.parametrize("name", ["flat with tensor", "across", "two networks, flat"])
@pytest.mark.every(3)
def test_where_no_rule_is_sound_it_begins_anew_and_says_so(saved, name):
    directory, old = saved
    said = []
    found = planned(name, SIGN)
    state = restored(directory, found, said.append)
    close(state.params, old.params, rtol=0)
    if name == "two networks, flat":  # the same devices, in the same order
        assert bits(state.exchange) == bits(old.exchange)
        assert not said
        return
    assert said == [
        "the state of the gradient exchange starts from zero, because "
        "the checkpoint was saved with a different plan"
    ]
    assert total(state.exchange.groups) == 0


def test_only_messages_cross_the_slow_network():
    found = planned("across, zero 3", {**SIGN, "vectors": "otherwise"}, inputs=12)
    compiled = found.train.lower(found.state_shapes, found.batch).compile()
    sent = ledger(compiled, found.layout.mesh)
    shard = (12 * 16 + 16 + 160) // 4  # 92 elements, of which each of two devices sums 46
    message = 6 * (1 + 2)  # in blocks of 8: their signs, and a scale
    words = [c for c in sent.collectives if c.axes == ("data_dcn",) and "u" in c.dtypes[0]]
    assert shard == 92
    assert sum(c.sent_bytes for c in words) == 2 * message
    # Beside them only numbers: the loss, its weight, whether all is finite.
    assert sent.sent_bytes("data_dcn") <= 2 * message + 64
