"""Every kernel gives plain attention's numbers, and memory grows as its docstring says.

Tolerances: an element's error over the largest element. In float32 two kernels differ in the order
of sums (1e-5); in bfloat16 each rounds scores' weights to 8 bits at its own scale (2e-2).
"""

import random
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdist.errors import ConfigError
from jaxdist.models.attention.blockwise import Blockwise
from jaxdist.models.attention.choose import Attend, choose_kernel
from jaxdist.models.attention.contract import AttentionRequest, Qkv
from jaxdist.models.attention.plain import Plain
from jaxdist.models.attention.splash import Splash
from jaxdist.models.hints import no_hint

TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}


def drawn(seed, lengths, most_features):
    """A kernel's arguments: shapes, dtype, window and documents by chance."""
    draw = random.Random(seed)
    batch, length, groups = draw.choice((1, 2, 3)), draw.choice(lengths), draw.choice((1, 2, 3))
    kv_heads, dtype = draw.choice((1, 2)), draw.choice((*TOLERANCE,))
    features = draw.randint(1, most_features // 2) * 2
    window = draw.choice((None, 1, draw.randint(1, length), 2 * length))
    keys = jax.random.split(jax.random.key(seed), 4)
    heads = (kv_heads * groups, kv_heads, kv_heads)
    arrays = [
        jax.random.normal(key, (batch, length, count, features)).astype(dtype)
        for key, count in zip(keys, heads, strict=False)
    ]
    segments = jnp.sort(jax.random.randint(keys[3], (batch, length), 0, 4), axis=1)
    return arrays, segments if draw.random() < 0.5 else None, window


def attended(kernel, arrays, segments, window, causal):
    """The result and the three gradients, float32."""

    def run(*arrays):
        out = kernel(Qkv(*arrays, segments), window=window, causal=causal, hint=no_hint)
        out = out.astype(jnp.float32)
        return jnp.square(out).sum(), out

    grads, out = jax.jit(jax.grad(run, argnums=(0, 1, 2), has_aux=True))(*arrays)
    return [np.asarray(x, np.float32) for x in (out, *grads)]


def agree(kernel, arrays, segments, window, *, seed):
    causal = random.Random(f"causal {seed}").random() < 0.6
    found = attended(kernel, arrays, segments, window, causal)
    expected = attended(Plain(), arrays, segments, window, causal)
    bound = TOLERANCE[str(arrays[0].dtype)]
    for ours, reference in zip(found, expected, strict=True):
        assert np.isfinite(ours).all()
        assert np.abs(ours - reference).max() <= bound * np.abs(reference).max()


def seeds(few, more, all_of_them):
    """Few draws in quick tests, more in full ones, and the rest in the slow sweep."""
    full = (pytest.param(seed, marks=pytest.mark.full) for seed in range(few, more))
    slow = (pytest.param(seed, marks=pytest.mark.slow) for seed in range(more, all_of_them))
    return [*range(few), *full, *slow]


@pytest.mark.parametrize("seed", seeds(3, 8, 40))
@pytest.mark.every(3)
def test_blockwise_gives_plain_numbers(seed):
    kernel = Blockwise(most=random.Random(seed).choice((8, 16, 40)))
    agree(kernel, *drawn(seed, range(1, 90), 12), seed=seed)


@pytest.mark.parametrize("seed", seeds(2, 3, 12))
@pytest.mark.every(2)
def test_splash_gives_plain_numbers(seed):
    arrays, segments, _ = drawn(seed, (128, 256, 640), 64)
    window = random.Random(seed).randint(1, 120) if seed % 2 else None
    agree(Splash(interpret=True), arrays, segments, window, seed=seed)


def test_a_window_hides_what_is_further_back():
    """The last query's result changes with the key `window` back, and with none before it."""
    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (jax.random.normal(key, (1, 40, 1, 8)) for key in keys)
    for kernel in (Plain(), Blockwise(most=8)):
        last = jax.jit(
            lambda v, kernel=kernel: kernel(Qkv(q, k, v), window=5, causal=True, hint=no_hint)[
                :, -1
            ]
        )
        assert (last(v) == last(v.at[:, 33].add(9))).all()
        assert (last(v) != last(v.at[:, 34].add(9))).any()


def temp_bytes(kernel, length):
    """Of the gradient's program for one row of two heads, one of keys."""
    shapes = [jax.ShapeDtypeStruct((1, length, heads, 16), jnp.float32) for heads in (2, 1, 1)]

    def total(*arrays):
        return kernel(Qkv(*arrays), window=None, causal=True, hint=no_hint).sum()

    compiled = jax.jit(jax.grad(total, argnums=(0, 1, 2))).lower(*shapes).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def test_memory_of_blockwise_is_linear_in_the_sequence():
    quarter, half, whole = (temp_bytes(Blockwise(), length) for length in (8192, 16384, 32768))
    assert half <= 2.05 * quarter
    assert whole <= 2.05 * half
    assert whole < 100 * 32768 * 4 * 16 < temp_bytes(Plain(), 16384) / 8


ASK = AttentionRequest("cpu", "bfloat16", heads=8, kv_heads=2, head_dim=64, length=4096)


@pytest.mark.parametrize(
    ("name", "changes", "kernel"),
    [
        ("auto", {}, "blockwise"),
        ("auto", {"length": 1024}, "plain"),
        ("auto", {"length": None}, "plain"),
        ("auto", {"platform": None}, "blockwise"),
        ("auto", {"platform": "gpu"}, "cudnn"),
        ("auto", {"platform": "gpu", "length": 128}, "cudnn"),
        ("auto", {"platform": "gpu", "dtype": "float32"}, "blockwise"),
        ("auto", {"platform": "gpu", "head_dim": 192, "length": 128}, "plain"),
        ("auto", {"platform": "gpu", "segments": True}, "cudnn"),
        ("auto", {"platform": "tpu"}, "splash"),
        ("auto", {"platform": "tpu", "dtype": "float32", "segments": True}, "splash"),
        ("auto", {"platform": "tpu", "length": 512}, "plain"),
        ("auto", {"platform": "tpu", "length": 1100}, "plain"),
        ("auto", {"platform": "tpu", "length": 4000}, "blockwise"),
        ("auto", {"platform": "tpu", "head_parts": 4}, "blockwise"),
        ("auto", {"platform": "tpu", "head_parts": 4, "kv_heads": 1}, "splash"),
        ("auto", {"platform": "tpu", "head_parts": 2, "kv_head_parts": 2}, "splash"),
        ("auto", {"platform": "tpu", "seq_parts": 2}, "blockwise"),
        ("plain", {"platform": "tpu"}, "plain"),
        ("blockwise", {"length": 7}, "blockwise"),
        ("splash", {"platform": "tpu", "length": 128}, "splash"),
        ("splash", {"platform": None}, "plain"),
        ("cudnn", {"platform": "gpu", "length": 128}, "cudnn"),
        ("cudnn", {"platform": None}, "plain"),
    ],
)
def test_the_kernel_that_is_chosen(name, changes, kernel):
    assert choose_kernel(name, replace(ASK, **changes)) == kernel


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("splash", {}, "attention splash runs on TPUs, but the mesh has cpu devices; "
         "use auto (here blockwise) or plain or blockwise"),
        ("splash", {"platform": "gpu"}, "runs on TPUs, but the mesh has gpu devices; "
         "use auto (here cudnn) or plain or blockwise or cudnn"),
        ("splash", {"platform": "tpu", "length": 1000},
         "needs a sequence length that 128 divides, but here it is 1000; use auto (here plain)"),
        ("splash", {"platform": "tpu", "seq_parts": 2}, "a mesh axis splits them into 2 parts"),
        ("splash", {"platform": "tpu", "head_parts": 4},
         "8 heads are in 4 parts, and 2 kv_heads are in 1; use auto (here blockwise)"),
        ("cudnn", {"platform": "tpu"}, "attention cudnn runs on GPUs, but the mesh has tpu "
         "devices; use auto (here splash) or plain or blockwise or splash"),
        ("cudnn", {"platform": "gpu", "dtype": "float32"},
         "needs compute_dtype: bfloat16, but here it is float32; use auto (here blockwise)"),
        ("cudnn", {"platform": None, "head_dim": 20}, "a head size of 8, 16, ... to 128, but here "
         "it is 20; use auto or plain or blockwise"),
        ("cudnn", {"platform": "gpu", "length": 77, "segments": True},
         "isolates documents only in sequences of even length, not of 77"),
    ],
)  # fmt: skip
def test_a_kernel_that_does_not_fit_is_refused_with_those_that_do(name, changes, message):
    with pytest.raises(ConfigError) as refused:
        choose_kernel(name, replace(ASK, **changes))
    assert message in str(refused.value)


def test_a_sequence_is_looked_at_where_it_comes():
    """Another length than the data's, as in generation, is refused by name too."""
    attend = Attend("splash", replace(ASK, platform="tpu", length=None), no_hint)
    shapes = [jax.ShapeDtypeStruct((1, 100, heads, 64), jnp.bfloat16) for heads in (8, 2, 2)]
    with pytest.raises(ConfigError, match="a sequence length that 128 divides, but here it is 100"):
        jax.eval_shape(attend, Qkv(*shapes))


def test_what_blockwise_keeps_has_the_name_that_policies_save():
    """With it saved, the backward pass does not scan forward again."""

    def scans(name):
        policy = jax.checkpoint_policies.save_only_these_names(name)

        def run(*arrays):
            return jnp.sin(Blockwise()(Qkv(*arrays), window=None, causal=True, hint=no_hint)).sum()

        shapes = [jax.ShapeDtypeStruct((1, 300, 2, 8), jnp.float32)] * 3
        gradient = jax.make_jaxpr(jax.grad(jax.checkpoint(run, policy=policy)))(*shapes)
        return str(gradient).count("scan[")

    assert scans("attention") == 2
    assert scans("another") == 3
