from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from ledgers import GPT

from jaxdist.cost.flops import jaxpr_flops
from jaxdist.experiment import ExperimentConfig, build
from jaxdist.experiment.flops import model_flops, step_flops
from jaxdist.hlo import ledger
from jaxdist.inspect.ideal import bound_notes, gradient_bound
from jaxdist.optim.muon import newton_schulz_flops

CNN = {
    **GPT,
    "model": {"type": "cnn", "channels": [4, 8], "hidden": 16},
    "data": {"type": "synthetic", "kind": "images", "height": 8, "width": 8, "examples": 64},
}


def experiment(sections: dict[str, Any], **changes: Any) -> ExperimentConfig:
    merged = {k: {**sections.get(k, {}), **v} for k, v in changes.items()}
    return ExperimentConfig.model_validate({**sections, **merged})


def flops(function: Any, *shapes: tuple[int, ...]) -> float:
    return jaxpr_flops(jax.make_jaxpr(function)(*(jnp.ones(shape) for shape in shapes)))


def test_products() -> None:
    assert flops(jnp.matmul, (3, 5), (5, 7)) == 2 * 3 * 5 * 7
    assert flops(jnp.matmul, (4, 3, 5), (4, 5, 7)) == 2 * 4 * 3 * 5 * 7
    assert flops(lambda x, y: jnp.einsum("abc,bc->a", x, y), (2, 3, 5), (3, 5)) == 2 * 2 * 3 * 5
    assert flops(jnp.add, (3, 5), (3, 5)) == 0


def test_loops_and_branches() -> None:
    def layers(x: jax.Array, kernels: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, kernel: (x @ kernel, None), x, kernels)[0]

    def nested(x: jax.Array, kernels: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, _: (layers(x, kernels), None), x, length=6)[0]

    def branches(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return jax.lax.cond(x[0, 0] > 0, lambda: x @ kernel @ kernel, lambda: x @ kernel)

    one = 2 * 3 * 5 * 5
    shapes = (3, 5), (4, 5, 5)
    assert flops(layers, *shapes) == 4 * one
    assert flops(jax.jit(nested), *shapes) == 6 * 4 * one
    assert flops(jax.grad(lambda *a: layers(*a).sum(), (0, 1)), *shapes) == 3 * 4 * one
    assert flops(branches, (3, 5), (5, 5)) == 2 * one


@pytest.mark.parametrize(
    "options",
    [
        {"padding": "VALID"},
        {"padding": "SAME", "window_strides": (2, 2)},
        {"padding": [(3, 2), (0, 1)], "rhs_dilation": (2, 1)},
        {"padding": "SAME", "feature_group_count": 2},
    ],
)
def test_convolutions_agree_with_xla(options: dict[str, Any]) -> None:
    groups = options.get("feature_group_count", 1)
    options = {"window_strides": (1, 1), "dimension_numbers": ("NHWC", "HWIO", "NHWC"), **options}
    image, kernel = jnp.ones((2, 9, 8, 4)), jnp.ones((3, 3, 4 // groups, 6))

    def convolution(image: jax.Array, kernel: jax.Array) -> jax.Array:
        return jax.lax.conv_general_dilated(image, kernel, **options)

    out, gradients = jax.vjp(convolution, image, kernel)
    for function, arguments in ((convolution, (image, kernel)), (gradients, (out,))):
        analysis: Any = jax.jit(function).lower(*arguments).cost_analysis()
        assert jaxpr_flops(jax.make_jaxpr(function)(*arguments)) == analysis["flops"]


@pytest.mark.parametrize("sections", [GPT, CNN], ids=["gpt", "cnn"])
@pytest.mark.every(2)
def test_one_device_without_remat_is_the_ideal(sections: dict[str, Any]) -> None:
    config = experiment(sections, mesh={"data": 1})
    built = build(config, devices=jax.devices()[:1])
    compiled = built.program.train.lower(built.program.state_shapes, built.program.batch).compile()
    found = ledger(compiled, built.layout.mesh).flops_high
    assert found == pytest.approx(model_flops(config, jax.devices()[0]), rel=0.02)


@pytest.mark.slow
def test_neither_remat_nor_kernels_nor_microbatches_nor_mesh_change_the_ideal() -> None:
    plain, device = experiment(GPT), jax.devices()[0]
    for changes in (
        {"model": {"remat": "full", "attention": "blockwise"}},
        {"train": {"microbatches": 4}},
        {"mesh": {"data": 4, "tensor": 2}},
        {"parallel": {"reduce": {"type": "ring"}}},
    ):
        assert model_flops(experiment(GPT, **changes), device) == model_flops(plain, device)
    longer = experiment(GPT, train={"batch_size": 32})
    assert model_flops(longer, device) == 2 * model_flops(plain, device)


@pytest.mark.full
def test_newton_schulz_is_no_work_of_the_model() -> None:
    """An MFU that counted it would grow with the optimizer."""
    plain, device = experiment(GPT), jax.devices()[0]
    found = step_flops(experiment(GPT, optim={"type": "muon"}), device)
    assert found.model == model_flops(plain, device) == sum(step_flops(plain, device))
    D, F, layers = 32, 128, 3
    matrices = 4 * newton_schulz_flops((D, D)) + 3 * newton_schulz_flops((D, F))
    assert found.update == layers * matrices


def bound(*, devices: int = 8, **changes: Any) -> Any:
    return gradient_bound(build(experiment(GPT, **changes), devices=jax.devices()[:devices]))


def test_the_bound_is_an_all_reduce_of_what_a_device_holds() -> None:
    D, F, V, layers = 32, 128, 32, 3
    kernels, norms = layers * (4 * D * D + 3 * D * F) + V * D, (2 * layers + 1) * D
    whole = 4 * (kernels + norms)
    assert bound(mesh={"data": 8}) == (("data",), 2 * 7 / 8 * whole)
    split = 4 * (kernels / 2 + norms)
    assert bound(mesh={"data": 4, "tensor": 2}) == (("data",), 2 * 3 / 4 * split)
    sharded = bound(
        devices=3,
        mesh={"data": 3},
        train={"batch_size": 12},
        sharding={"rules": {"layers": "data"}},
    )
    assert sharded == (("data",), 2 * 2 / 3 * whole)


def test_the_bound_in_bfloat16_over_two_networks_and_over_none() -> None:
    axes, whole = bound(mesh={"data": 8})
    half = bound(mesh={"data": {"dcn": 2, "ici": 4}}, model={"compute_dtype": "bfloat16"})
    assert half == (("data_dcn", "data_ici"), whole / 2)
    assert bound(mesh={"tensor": 2, "data": 4}, sharding={"rules": {"batch": None}}) is None
    assert bound(mesh={"tensor": 2, "context": 4}) is None
    assert axes == ("data",)


BF16 = {"compute_dtype": "bfloat16"}
WIDE = "parameters and their gradients are float32"
BOTH = "parallel.zero.stage 3 gathers parameters for both passes"
EACH = "each of the 2 microbatches (train.microbatches) sends its own gradients"


@pytest.mark.parametrize(
    ("changes", "dtype", "left_out"),
    [
        ({}, "float32", []),
        ({"model": BF16}, "bfloat16", [WIDE]),
        ({"model": BF16, "optim": {"master_weights": "bfloat16"}}, "bfloat16", []),
        ({"parallel": {"zero": {"stage": 1}}, "train": {"microbatches": 2}}, "float32", []),
        ({"parallel": {"zero": {"stage": 2}}, "train": {"microbatches": 2}}, "float32", [EACH]),
        ({"model": BF16, "parallel": {"zero": {"stage": 3}}, "train": {"microbatches": 2}},
         "bfloat16", [WIDE, BOTH, EACH]),
    ],
)  # fmt: skip
def test_the_bound_says_what_it_assumes_and_leaves_out(
    changes: dict[str, Any], dtype: str, left_out: list[str]
) -> None:
    config = experiment(GPT, mesh={"data": 8}, **changes)
    assumed, *more = bound_notes(build(config, devices=jax.devices()))
    assert assumed == f"one all-reduce of the gradients in {dtype}, the model's compute dtype"
    assert more == left_out
