"""Kernels of attention inside the model: on meshes, in stages, and in programs for TPU."""

import itertools
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxdist.config import Document, validate
from jaxdist.errors import ConfigError
from jaxdist.experiment import ExperimentConfig, build
from jaxdist.hlo import ledger
from jaxdist.models.attention import choose
from jaxdist.models.attention.blockwise import Blockwise
from jaxdist.models.attention.contract import Qkv
from jaxdist.models.attention.splash import Splash
from jaxdist.models.hints import no_hint
from jaxdist.models.rotary import rotate
from jaxdist.sharding import Layout

SPLIT = {"data": 4, "tensor": 2}
STAGES = {"stage": 2, "data": 2, "tensor": 2}
RING, ONE_PASS = {"reduce": {"type": "ring"}}, {"reduce": {"type": "xla"}}
full = partial(pytest.param, marks=pytest.mark.full)
slow = partial(pytest.param, marks=pytest.mark.slow)


def experiment(devices, mesh, *, length=48, train=None, parallel=None, rules=None, **model):
    sections = {
        "model": {
            "type": "gpt", "layers": 2, "embed": 64, "heads": 4, "kv_heads": 2,
            "isolate_documents": True, **model,
        },
        "data": {"type": "synthetic", "kind": "tokens", "window": length, "heldout_examples": 0},
        "optim": {"type": "adamw", "learning_rate": 1e-2},
        "train": {"steps": 9, "batch_size": 8, **(train or {})},
        "parallel": parallel or {},
        "sharding": {"rules": rules or {}},
        "mesh": mesh,
    }  # fmt: skip
    return build(validate(Document(sections), ExperimentConfig), devices=devices)


def losses(found):
    state = found.program.init()
    values = []
    with found.loader.batches() as batches:
        for batch in itertools.islice(batches, 3):
            state, metrics = found.program.train(state, batch)
            values.append(float(metrics[0]))
    return values


ZERO_BUBBLE = {"pipeline": {"schedule": {"type": "zb_h1"}}}
PLANS = [
    slow({"data": 1}, {}),
    full(SPLIT, {"parallel": {"zero": {"stage": 3}, **RING}, "remat": "full"}),
    slow(SPLIT, {}),  # the row before has all of it
    slow(STAGES, {"train": {"microbatches": 4}, "parallel": ZERO_BUBBLE}),
    slow(STAGES, {"train": {"microbatches": 2}}),  # so has the next
    slow(STAGES, {"train": {"microbatches": 2}, "parallel": {"zero": {"stage": 2}, **ONE_PASS}}),
]


@pytest.fixture(scope="module")
def plain_losses():
    one = experiment(jax.devices()[:1], {"data": 1}, attention="plain", attention_window=20)
    return losses(one)


@pytest.mark.parametrize(("mesh", "settings"), PLANS)
@pytest.mark.slow
def test_blockwise_trains_like_plain_on_every_mesh(mesh, settings, plain_losses, monkeypatch):
    """Three steps of a windowed model with documents: losses to 1e-5, relative."""
    monkeypatch.setitem(choose.KERNELS, "blockwise", Blockwise(most=16))
    devices = jax.devices()[: int(np.prod([*mesh.values()]))]
    found = experiment(devices, mesh, attention="blockwise", attention_window=20, **settings)
    np.testing.assert_allclose(losses(found), plain_losses, rtol=1e-5)


@pytest.mark.full
def test_the_window_reaches_the_model(devices):
    """The last logits change with the first token if windows reach it: layers times the window."""
    tokens = jnp.arange(8)[None]
    for window, seen in ((3, False), (4, True), (None, True)):
        model = experiment(devices[:1], {"data": 1}, attention_window=window).program.model
        params, buffers = model.init(jax.random.key(0))
        last = jax.jit(lambda p, x, m=model, b=buffers: m.bind(p, b)(x, None)[0, 7])
        assert (last(params, tokens) != last(params, tokens.at[0, 0].set(9))).any() == seen


def test_a_window_that_hides_nothing_is_told(devices):
    """Sequences have 48 positions here."""
    for window, told in ((46, []), (47, ["model.attention_window 47 has no effect"])):
        notices = experiment(devices[:1], {"data": 1}, attention_window=window).notices
        assert [notice.split(":")[0] for notice in notices] == told


def compiled(devices, mesh, **settings):
    program = experiment(devices, mesh, **settings).program
    step = program.train.lower(program.state_shapes, program.batch).compile()
    return step, ledger(step, program.layout.mesh)


def sent(found):
    return sorted((str(c.kind), str(c.axes), c.payload_bytes) for c in found.collectives)


@pytest.mark.full
def test_blockwise_sends_what_plain_does(devices):
    of_both = [
        sent(compiled(devices, SPLIT, length=512, attention=name)[1])
        for name in ("plain", "blockwise")
    ]
    assert of_both[0] == of_both[1]


SPLASH = {"attention": "splash", "compute_dtype": "bfloat16", "length": 256}


TWO = {"train": {"microbatches": 2}}
FOR_TPU = [
    (SPLIT, {"parallel": {"zero": {"stage": 3}}}, 3),
    (SPLIT, {"parallel": {"zero": {"stage": 3}, **ONE_PASS}, "remat": "full"}, 4),
    (STAGES, TWO, 4),
    full(STAGES, {**TWO, "parallel": {"zero": {"stage": 2}, **ONE_PASS}}, 4),
    full(SPLIT, {"rules": {"residual_seq": "tensor"}}, 3),
    full(SPLIT, {"kv_heads": 1, "rules": {"kv_heads": None}}, 3),
    full({"data": 4, "context": 2}, {}, 3),
]
"""Mesh, settings, and calls of the kernel: forward, two backward, and forward again in remat."""
LOWERED = (0, 1, 2, 4, 5, 6)
"""Rows that compile in the full sweep alone: the others have their meshes."""


@pytest.mark.needs_libtpu
@pytest.mark.parametrize(("mesh", "settings", "kernels"), FOR_TPU, ids=str)
@pytest.mark.every(3)
def test_splash_is_lowered_for_tpu(mesh, settings, kernels, tpu_devices):
    program = experiment(tpu_devices, mesh, **SPLASH, **settings).program
    lowered = program.train.lower(program.state_shapes, program.batch)
    assert len(set(re.findall(r"splash_mha_\w+", lowered.as_text()))) >= 3


@pytest.mark.needs_libtpu
@pytest.mark.parametrize(
    ("mesh", "settings", "kernels"),
    [
        (slow if at in LOWERED else full)(*getattr(found, "values", found))
        for at, found in enumerate(FOR_TPU)
    ],
    ids=str,
)
@pytest.mark.slow
def test_splash_is_in_the_program_for_tpu(mesh, settings, kernels, tpu_devices):
    step, _ = compiled(tpu_devices, mesh, **SPLASH, **settings)
    assert len(re.findall('custom_call_target="tpu_custom_call"', step.as_text())) == kernels


@pytest.mark.needs_libtpu
def test_heads_that_an_axis_splits_are_turned_where_they_lie(tpu_devices):
    """In a stage too, where another axis is manual; forward and backward."""
    types = (AxisType.Auto,) * 2
    mesh = jax.make_mesh((4, 2), ("stage", "tensor"), axis_types=types, devices=tpu_devices)
    whole = NamedSharding(mesh, PartitionSpec("stage", None, "tensor"))
    x = jax.ShapeDtypeStruct((4, 128, 8, 128), jnp.bfloat16, sharding=whole)

    def local(x):
        by_heads = PartitionSpec(None, None, "tensor")
        inside = NamedSharding(jax.sharding.get_abstract_mesh(), by_heads)
        x = jax.lax.with_sharding_constraint(x, inside)
        return rotate(x, theta=1e4, by_product=True)

    stage = PartitionSpec("stage")
    on_stages = jax.shard_map(
        local, mesh=mesh, axis_names={"stage"}, in_specs=stage, out_specs=stage, check_vma=False
    )

    def turned(x, dy):
        y, pull = jax.vjp(on_stages, x)
        return y, pull(dy)[0]

    step = jax.jit(turned, out_shardings=(whole, whole)).lower(x, x).compile()
    assert ledger(step, mesh).collectives == ()


@pytest.mark.slow
@pytest.mark.needs_libtpu
@pytest.mark.parametrize(
    "settings",
    [pytest.param({}, marks=pytest.mark.slow), {"parallel": {"zero": {"stage": 3}}}],
    ids=str,
)
def test_splash_sends_what_plain_does(settings, tpu_devices):
    of_both = [
        sent(compiled(tpu_devices, SPLIT, **{**SPLASH, "attention": name}, **settings)[1])
        for name in ("plain", "splash")
    ]
    assert of_both[0] == of_both[1]


@pytest.mark.slow
@pytest.mark.needs_libtpu
def test_auto_is_splash_on_tpu_and_falls_back(tpu_devices):
    for length, kv_heads, rules, there in (
        (1024, 2, {}, True), (1024, 2, {"kv_heads": None}, False), (96, 2, {}, False)
    ):  # fmt: skip
        found = experiment(tpu_devices, SPLIT, length=length, kv_heads=kv_heads, rules=rules)
        program = found.program
        lowered = program.train.lower(program.state_shapes, program.batch)
        assert ("tpu_custom_call" in lowered.as_text()) is there


@pytest.mark.full
@pytest.mark.needs_libtpu
def test_splash_is_not_run_again_where_its_name_is_saved(tpu_devices):
    def kernels(name):
        policy = jax.checkpoint_policies.save_only_these_names(name)

        def run(*arrays):
            return jnp.sin(Splash()(Qkv(*arrays), window=None, causal=True, hint=no_hint)).sum()

        gradient = jax.jit(jax.value_and_grad(jax.checkpoint(run, policy=policy), argnums=(0, 1)))
        one = jax.sharding.SingleDeviceSharding(tpu_devices[0])
        shapes = [jax.ShapeDtypeStruct((1, 128, 2, 64), jnp.float32, sharding=one)] * 3
        return gradient.lower(*shapes).compile().as_text().count('="tpu_custom_call"')

    assert (kernels("attention"), kernels("another")) == (3, 4)


@pytest.mark.parametrize(
    ("length", "model", "rules", "message"),
    [
        (48, {"attention": "splash"}, {}, "model.attention = 'splash' (a config from "
         "Python): attention splash runs on TPUs, but the mesh has cpu devices; use auto (here "
         "plain) or plain or blockwise"),
        (48, {"attention": "cudnn", "compute_dtype": "bfloat16"}, {}, "runs on GPUs, but the mesh"),
    ],
)  # fmt: skip
def test_a_kernel_is_refused_before_a_run(length, model, rules, message, devices):
    with pytest.raises(ConfigError) as refused:
        experiment(devices, SPLIT, length=length, rules=rules, **model)
    assert message in " ".join(str(refused.value).split())


@pytest.mark.needs_libtpu
@pytest.mark.parametrize(
    ("length", "rules", "message"),
    [
        (
            200,
            {},
            "needs a sequence length that 128 divides, but here it is 200; use auto (here plain)",
        ),
        (
            256,
            {"kv_heads": None},
            "4 heads are in 2 parts, and 2 kv_heads are in 1; use auto (here plain)",
        ),
    ],
)
def test_splash_is_refused_where_the_data_or_the_mesh_forbid_it(
    length, rules, message, tpu_devices
):
    with pytest.raises(ConfigError) as refused:
        experiment(tpu_devices, SPLIT, length=length, rules=rules, attention="splash")
    assert message in " ".join(str(refused.value).split())


def layout(sizes):
    count = int(np.prod([*sizes.values()]))
    types = (AxisType.Auto,) * len(sizes)
    devices = jax.devices()[:count]
    return Layout(jax.make_mesh((*sizes.values(),), (*sizes,), axis_types=types, devices=devices))


@pytest.mark.parametrize(("rows", "block", "inside"), [(8, 2, False), (8, 2, True), (3, 3, False)])
def test_a_function_of_blocks_sees_one_device_s_rows_and_heads(rows, block, inside):
    found, shapes = layout({"data": 4, "tensor": 2}), []
    x = jnp.arange(rows * 24.0).reshape(rows, 1, 4, 6)

    def double(x, y):
        shapes.append((x.shape, y.shape))
        return 2 * x * y

    dims = ("batch", "seq", "heads", "head_dim")
    run = found.on_blocks(double, dims, ("batch", "seq", None, None))
    if inside:
        spec = PartitionSpec("data")
        run = jax.shard_map(
            run, mesh=found.mesh, axis_names={"data"}, in_specs=spec, out_specs=spec,
            check_vma=False,
        )  # fmt: skip
    ones = jnp.ones((rows, 1, 1, 1))
    jitted = jax.jit(jax.grad(lambda x: jnp.square(run(x, ones)).sum()))
    given = jax.device_put(x, NamedSharding(found.mesh, PartitionSpec()))
    np.testing.assert_allclose(jitted(given), 8 * x)
    assert shapes[0] == ((block, 1, 2, 6), (block, 1, 1, 1))
