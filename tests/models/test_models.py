import importlib
import inspect
import pkgutil
import re
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from initialized import initialized
from pydantic import ValidationError

import jaxdist.models
from jaxdist.hlo import ledger
from jaxdist.models.fences import fence
from jaxdist.models.functional import functional
from jaxdist.models.gpt import GptConfig
from jaxdist.models.images.cnn import CnnConfig, max_pool
from jaxdist.models.images.mlp import MlpConfig
from jaxdist.models.layers import RMSNorm
from jaxdist.models.rotary import Llama3Scaling, frequencies, rotate
from jaxdist.trees import tree_size

VOCAB = 257
full = partial(pytest.param, marks=pytest.mark.full)
slow = partial(pytest.param, marks=pytest.mark.slow)


def gpt(**changes):
    settings = {"type": "gpt", "layers": 3, "embed": 32, "heads": 4, "kv_heads": 2, **changes}
    config = GptConfig.model_validate(settings)
    return functional(lambda rngs: config.build(rngs, vocab_size=VOCAB))


def run(model, *inputs):
    params, buffers = initialized(model)
    return jax.jit(lambda p, *x: model.bind(p, buffers)(*x))(params, *inputs)


def tokens(batch=2, length=16):
    return jax.random.randint(jax.random.key(1), (batch, length), 0, VOCAB)


def test_models_name_no_mesh_and_no_collectives():
    for module in pkgutil.walk_packages(jaxdist.models.__path__, "jaxdist.models."):
        if module.name == "jaxdist.models.attention.shared":
            continue  # a kernel for sequences that devices share, which no model names
        source = inspect.getsource(importlib.import_module(module.name))
        assert not re.search(r"jaxdist\.(mesh|sharding|collectives)|shard_map|psum", source)


def test_every_parameter_names_as_many_dims_as_it_has():
    image = {"shape": (8, 8, 1), "classes": 10}
    mlp = MlpConfig(type="mlp", hidden=[16, 8, 4])
    cnn = CnnConfig(type="cnn", channels=[4, 8], hidden=8)
    for model in (
        gpt(),
        gpt(tied_head=False),
        functional(lambda rngs: mlp.build(rngs, **image)),
        functional(lambda rngs: cnn.build(rngs, **image)),
    ):
        flat = dict(jax.tree_util.tree_flatten_with_path(model.params)[0])
        shapes = {"/".join(k.key for k in path): leaf.shape for path, leaf in flat.items()}
        assert {name: len(dims) for name, dims in model.dims.items()} == {
            name: len(shape) for name, shape in shapes.items()
        }


def test_parameter_count_is_the_formula():
    D, F, V, N, H, K, d = 32, 128, 320, 3, 4, 2, 8
    block = D * (H + 2 * K) * d + H * d * D + 3 * D * F + 2 * D
    assert tree_size(gpt().params) == V * D + N * block + D
    assert tree_size(gpt(tied_head=False).params) == 2 * V * D + N * block + D


def test_no_position_sees_the_future():
    """The gradient of the logits at one position reaches embeddings of no later position."""
    model = gpt()
    params, buffers = initialized(model)
    position = 7

    def logit(x_BLD):
        module = model.bind(params, buffers)
        object.__setattr__(module, "embed", lambda _: x_BLD)
        return module(tokens(1))[0, position].sum()

    x_BLD = jax.random.normal(jax.random.key(2), (1, 16, 32))
    reach = np.abs(jax.jit(jax.grad(logit))(x_BLD)).sum((0, 2))
    assert (reach[: position + 1] > 0).all()
    assert (reach[position + 1 :] == 0).all()


@pytest.mark.full
def test_isolated_documents_do_not_see_each_other():
    model = gpt(isolate_documents=True)
    segments = jnp.repeat(jnp.arange(2), 8)[None]
    first, second = tokens(1), tokens(1).at[0, :8].set(3)
    alone = run(model, first, segments)[0, 8:]
    np.testing.assert_allclose(run(model, second, segments)[0, 8:], alone, atol=1e-5)
    joined = run(gpt(), second, segments)[0, 8:]
    assert np.abs(joined - run(gpt(), first, segments)[0, 8:]).max() > 1e-3


@pytest.mark.parametrize(
    "changes",
    [
        {"remat": "full"},
        slow({"remat": "dots"}),
        slow({"remat": "elementwise"}),
        slow({"scan_unroll": 3}),
        slow({"remat": ("full", "none"), "layers": 6}),
        slow({"remat": ("full", "none"), "layers": 6, "scan_unroll": 4}),
        full({"remat": ("full", "none", "dots", "elementwise"), "layers": 6}),
        slow(
            {
                "remat": ("minimal", "save_dots_except_mlp", "save_qkv", "save_attention"),
                "layers": 6,
            }
        ),
        full({"remat": {"query": "save", "mlp_gate": "save", "value": "recompute"}}),
        slow({"remat": ("full", "none")}),
        slow({"remat": ("full", "none", "dots")}),
    ],
    ids=str,
)
@pytest.mark.every(2)
def test_remat_and_unroll_change_no_gradient(changes):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-2),
        plain_gradient(changes.get("layers", 3)),
        gradient(gpt(**changes)),
    )


def gradient(model):
    params, buffers = initialized(model)
    return jax.jit(jax.grad(lambda p: jnp.square(model.bind(p, buffers)(tokens())).sum()))(params)


@cache
def plain_gradient(layers):
    return gradient(gpt(layers=layers))


@pytest.mark.full
@pytest.mark.parametrize("unroll", [1, slow(2), slow(4)])
def test_remat_recomputes(unroll):
    """The rematerialised backward pass computes more; in a loop it keeps less, too."""

    def compiled(**changes):
        model = gpt(embed=64, layers=4, scan_unroll=unroll, **changes)
        params, buffers = model.params, model.buffers
        x = jax.ShapeDtypeStruct((8, 128), jnp.int32)

        def loss(p, x):
            return jnp.square(model.bind(p, buffers)(x)).mean()

        return jax.jit(jax.grad(loss)).lower(params, x).compile()

    programs = [compiled(), compiled(remat="full"), compiled(remat="elementwise")]
    temp = [c.memory_analysis().temp_size_in_bytes for c in programs]
    if unroll < 4:  # without a loop it is XLA's scheduler that says what lives when
        assert temp[1] < 0.7 * temp[0]
        assert temp[2] < 0.8 * temp[0]
    mesh = jax.make_mesh((1,), ("data",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:1])
    flops = [ledger(c, mesh).flops_high for c in programs]
    assert flops[1] > 1.15 * flops[0]
    assert flops[2] == flops[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layers", "recomputed"),
    # Eleven blocks leave a rest of either list.
    [(11, (5, 8)), slow(8, (4, 6)), slow(9, (4, 6))],
)
def test_remat_of_some_blocks_recomputes_those_and_keeps_less(layers, recomputed):
    def compiled(remat):
        model = gpt(embed=64, layers=layers, remat=remat)
        x = jax.ShapeDtypeStruct((8, 128), jnp.int32)

        def loss(p, x):
            return jnp.square(model.bind(p, model.buffers)(x)).mean()

        found = jax.jit(jax.grad(loss)).lower(model.params, x).compile()
        return ledger(found, mesh).flops_high, found.memory_analysis().temp_size_in_bytes

    mesh = jax.make_mesh((1,), ("data",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:1])
    nothing, some, more, all_of_it = (
        compiled(remat) for remat in ("none", ("none", "full"), ("full", "full", "none"), "full")
    )
    assert nothing[1] > some[1] > more[1] > all_of_it[1]
    block = (all_of_it[0] - nothing[0]) / layers  # recomputed
    found = [(program[0] - nothing[0]) / block for program in (some, more)]
    assert found == pytest.approx(recomputed)


def test_depth_does_not_grow_the_program():
    def size(layers):
        model = gpt(layers=layers)
        x = jax.ShapeDtypeStruct((2, 16), jnp.int32)
        lowered = jax.jit(lambda p, x: model.bind(p, {})(x)).lower(model.params, x)
        return len(lowered.as_text().splitlines())

    assert size(32) == size(2)


@pytest.mark.full
def test_scan_equals_the_blocks_one_by_one():
    model = gpt()
    params, buffers = initialized(model)

    @jax.jit
    def one_by_one(params):
        module = model.bind(params, buffers)
        x = module.embed(tokens())
        graph, state = nnx.split(module.blocks)
        for layer in range(3):
            x = nnx.merge(graph, jax.tree.map(lambda leaf, i=layer: leaf[i], state))(x, None)
        return module.head(x)

    np.testing.assert_allclose(one_by_one(params), run(model, tokens()), rtol=1e-4, atol=1e-4)


def test_layers_start_different_from_each_other():
    params, _ = initialized(gpt())
    query = params["blocks"]["attention"]["query"]
    assert np.abs(query[0] - query[1]).max() > 0.1


def test_bfloat16_computes_in_bfloat16_with_float32_parameters():
    model = gpt(compute_dtype="bfloat16")
    assert run(model, tokens()).dtype == jnp.bfloat16
    assert {leaf.dtype for leaf in jax.tree.leaves(model.params)} == {jnp.dtype("float32")}
    np.testing.assert_allclose(
        run(model, tokens()).astype(np.float32), run(gpt(), tokens()), atol=0.1
    )


def test_rotary_scores_depend_on_distance_only():
    q = jnp.broadcast_to(jax.random.normal(jax.random.key(0), (1, 1, 1, 8)), (1, 6, 1, 8))
    k = jnp.broadcast_to(jax.random.normal(jax.random.key(1), (1, 1, 1, 8)), (1, 6, 1, 8))
    scores = jnp.einsum("blhd,bmhd->lm", rotate(q, theta=100.0), rotate(k, theta=100.0))
    for distance in range(-5, 6):
        diagonal = np.diagonal(scores, distance)
        np.testing.assert_allclose(diagonal, diagonal[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("theta", "scaling", "right"),
    [
        (1e4, None, "1p0 1.b93a6ap-3 1.7c3d2ap-5 1.47ae14p-7 1.1a62d2p-9 1.e6b4b8p-12"),
        (
            5e5,
            Llama3Scaling(
                type="llama3",
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_length=64,
            ),
            "1p0 1.32c2cp-6 1.9cd9d2p-10 1.72ba42p-13 1.4ce6ecp-16 1.2aefa4p-19",
        ),
    ],
)
def test_frequencies_have_the_bits_of_transformers(theta, scaling, right):
    """Heads of 12, with `LlamaRotaryEmbedding.inv_freq` of transformers 5 in hexadecimal."""
    found = frequencies(theta, 12, scaling)
    assert found.dtype == np.float32
    assert found.tolist() == [float.fromhex(f"0x{x}") for x in right.split()]


def test_rotation_by_a_product_has_the_same_bits():
    x = jax.random.normal(jax.random.key(0), (2, 33, 3, 16), jnp.bfloat16)

    def rotated(x, by_product):
        return rotate(x, theta=100.0, by_product=by_product)

    np.testing.assert_array_equal(*(rotated(x, way) for way in (False, True)))
    of_x = (jax.vjp(partial(rotated, by_product=way), x)[1](x)[0] for way in (False, True))
    np.testing.assert_allclose(*(g.astype(jnp.float32) for g in of_x), atol=0.04)


@pytest.mark.parametrize(("passes", "barriers"), [("none", 0), ("backward", 1), ("both", 2)])
def test_a_fence_is_an_identity_that_xla_sees(passes, barriers):
    value, gradient = jax.value_and_grad(lambda x: fence(x, passes) ** 2)(3.0)
    assert (value, gradient) == (9.0, 6.0)
    program = str(jax.make_jaxpr(jax.grad(lambda x: fence(x, passes) ** 2))(3.0))
    assert program.count("optimization_barrier") == barriers


@pytest.mark.parametrize(("platform", "fenced"), [("tpu", True), ("cpu", False), (None, False)])
@pytest.mark.every(3)
def test_only_models_for_tpus_have_fences(platform, fenced):
    config = GptConfig(type="gpt", layers=1, embed=8, heads=2, compute_dtype="bfloat16")

    def loss(state, graph):
        return nnx.merge(graph, state)(jnp.zeros((1, 4), jnp.int32)).sum()

    graph, state = nnx.split(config.build(nnx.Rngs(0), vocab_size=64, platform=platform))
    program = str(jax.make_jaxpr(jax.grad(lambda state: loss(state, graph)))(state))
    assert ("optimization_barrier" in program) == fenced


def test_rms_norm_by_hand():
    norm = RMSNorm(2, nnx.Rngs(0), epsilon=0.0)
    np.testing.assert_allclose(norm(jnp.array([[3.0, 4.0]])), [[0.8485281, 1.1313708]], rtol=1e-6)


def test_max_pool_by_hand():
    x = jnp.arange(15.0).reshape(1, 3, 5, 1)
    np.testing.assert_array_equal(max_pool(x)[0, :, :, 0], [[6, 8]])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"embed": 30, "heads": 4}, r"embed 30 over heads 4 .* use heads 1 or 3 or 5"),
        ({"embed": 12, "heads": 4}, r"even head size"),
        ({"kv_heads": 3}, r"kv_heads 3 must divide heads 4"),
        ({"remat": ("full",) * 4}, r"remat lists 4 blocks, but layers is 3"),
        ({"scan_unroll": 9}, r"scan_unroll 9 exceeds layers 3"),
        (
            {"attention": "cudnn"},
            r"cudnn needs compute_dtype: bfloat16, but here it is float32; use",
        ),
        ({"attention": "xla"}, r"the attention that XLA compiles is called plain"),
    ],
)
def test_sizes_that_do_not_fit(changes, message):
    with pytest.raises(ValidationError, match=message):
        gpt(**changes)
