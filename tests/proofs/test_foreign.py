"""`jaxdist.prove`: steps in other people's style, right and with faults, and what it refuses."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from documents import ROOT, blocks
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxdist
from benchmarks.prove.known import FAULTS, ROWS, alone, proof_of_trainer
from benchmarks.prove.strangers import FSDP_FAULTS, batch_on, fsdp_state, fsdp_step, mesh_of
from jaxdist.errors import RunError

MESH = ROWS


@pytest.mark.parametrize("trainer", FAULTS)
@pytest.mark.every(2)
def test_a_right_trainer_is_proved(trainer):
    proof = proof_of_trainer(trainer)
    assert proof.verdict == "proved", str(proof)
    assert not proof.sent.unasked


PLANTED = [(trainer, fault) for trainer, faults in FAULTS.items() for fault in faults]
QUICK = (FSDP_FAULTS[0], FSDP_FAULTS[3])


@pytest.mark.parametrize(
    ("trainer", "fault"),
    [
        pytest.param(*one, marks=() if one[1] in QUICK else pytest.mark.full, id=one[1])
        for one in PLANTED
    ],
)
def test_planted_faults_are_found(trainer, fault):
    proof = proof_of_trainer(trainer, fault)
    assert proof.verdict == "wrong", str(proof)


def simple(state: Any, batch: Any) -> Any:
    grad = jax.grad(lambda w: jnp.mean((batch["x"] @ w) ** 2))(state["w"])
    return {"w": state["w"] - grad}, {"norm": jnp.linalg.norm(grad)}


STATE, BATCH = {"w": jnp.ones(3)}, {"x": np.ones((8, 3), np.float32)}
REFUSED: dict[str, tuple[Any, Any, str]] = {
    "a step that cannot be traced": (
        lambda state, batch: (state, float(batch["x"].sum())),
        STATE,
        "the step cannot be traced .*ConcretizationTypeError",
    ),
    "a step that returns one value": (
        lambda state, batch: state,
        STATE,
        "returns dict, not two values: .* first; a step that changes flax.nnx objects",
    ),
    "a step that changes its state in place": (
        lambda state, batch: (None, batch["x"].sum()),
        STATE,
        r"returns another state than it gets .*nnx.split.*nothing instead of state/w \(3,\)",
    ),
    "an object in the state": (simple, {"w": object()}, "w is object, not an array"),
    "arrays that are not on the mesh": (
        lambda state, batch: (state, batch["x"].sum()),
        STATE,
        "neither state nor batch is on the 4 devices of the mesh",
    ),
    "a state of another shape": (
        lambda state, batch: ({"w": state["w"][:2]}, {}),
        STATE,
        r"another state than it gets .*: state/w \(2,\) instead of state/w \(3,\)",
    ),
    "another mesh": (
        lambda state, batch: (
            state,
            jax.shard_map(
                lambda x: jax.lax.psum(x.sum(), "data"),
                mesh=mesh_of(2),
                in_specs=P("data"),
                out_specs=P(),
            )(batch["x"]),
        ),
        STATE,
        "shard_map is for the mesh {'data': 2}, but the argument mesh is {'data': 4}",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_proved_is_refused_by_name(name):
    step, state, message = REFUSED[name]
    with pytest.raises(RunError, match=message):
        jaxdist.prove(step, MESH, state, BATCH)


REFERENCES: dict[str, tuple[Any, str]] = {
    "a reference that cannot be traced": (
        lambda state, batch: (state["v"], {}),
        "one_device cannot be traced .*KeyError",
    ),
    "a reference with other outputs": (
        lambda state, batch: (state, {"loss": 0.0}),
        r"other arrays than the step: outputs/loss \(\) instead of outputs/norm \(\)",
    ),
    "a reference that returns one value": (
        lambda state, batch: batch["x"].sum(),
        "one_device returns ShapeDtypeStruct, not two values",
    ),
}


@pytest.mark.parametrize("name", REFERENCES)
def test_a_reference_that_does_not_fit_is_refused(name, rows):
    one_device, message = REFERENCES[name]
    with pytest.raises(RunError, match=message):
        jaxdist.prove(simple, MESH, STATE, rows, one_device=one_device)


def test_arguments_that_cannot_be_used_are_refused(rows):
    used = {"w": jnp.ones(3)}
    used["w"].delete()
    with pytest.raises(RunError, match="w was donated to an earlier step: pass a copy"):
        jaxdist.prove(simple, MESH, used, rows)
    with pytest.raises(RunError, match=r"mesh must be a jax.sharding.Mesh, not NoneType"):
        jaxdist.prove(simple, None, STATE, rows)  # pyright: ignore[reportArgumentType]
    with pytest.raises(RunError, match="the batch has no array of examples"):
        jaxdist.prove(simple, MESH, STATE, {})


def test_a_step_that_changes_python_objects_is_undecided(rows):
    counted: list[None] = []

    def step(state: Any, batch: Any) -> Any:
        counted.append(None)
        return {"w": state["w"] + len(counted)}, {}

    proof = jaxdist.prove(step, MESH, STATE, rows, one_device=jax.jit(step))
    assert proof.verdict != "proved"
    assert "later steps" in {one.what for one in proof.undecided}


@pytest.fixture
def rows() -> Any:
    return {"x": jax.device_put(BATCH["x"], NamedSharding(MESH, P("data")))}


def test_without_a_step_on_one_device_the_scale_is_undecided(rows):
    proof = jaxdist.prove(simple, MESH, STATE, rows)
    assert proof.verdict == "undecided"
    assert [(one.part, one.what) for one in proof.undecided] == [("numbers", "the scale")]
    assert [one.plan for one in proof.numbers] == ["rows in another order", "the scale"]


def test_donated_arguments_stay_the_caller_s(rows):
    state = {"w": jnp.ones(3)}
    step = jax.jit(simple, donate_argnums=0)
    assert jaxdist.prove(step, MESH, state, rows, one_device=simple).verdict == "proved"
    assert float(state["w"].sum()) == 3


def test_a_kernel_without_a_rule_is_undecided_and_named():
    def local(x: jax.Array) -> jax.Array:
        shape = jax.ShapeDtypeStruct((x.shape[1],), x.dtype)
        return jax.pure_callback(lambda x: np.asarray(x).sum(0), shape, x)

    def step(state: Any, batch: Any) -> Any:
        whole = jax.shard_map(local, mesh=MESH, in_specs=P("data"), out_specs=P(), check_vma=False)
        return {"w": whole(batch["x"])}, {}

    proof = jaxdist.prove(step, MESH, STATE, BATCH, one_device=lambda s, b: (
        {"w": b["x"].sum(0)}, {}
    ))  # fmt: skip
    assert proof.verdict != "proved"
    assert any("pure_callback" in one.why for one in proof.undecided), proof.undecided


def test_the_guide_s_example_runs():
    """It names the leaf of weights "mask"."""
    (text,) = blocks(ROOT / "docs/guides/prove.md", "python")
    renamed = {"x": "x", "y": "y", "weight": "mask"}

    def make_step(mesh: Mesh) -> Any:
        inner = fsdp_step(MESH) if mesh.size > 1 else alone("fsdp")
        return jax.jit(lambda state, batch: inner(state, {n: batch[o] for n, o in renamed.items()}))

    batch = {renamed[name]: leaf for name, leaf in batch_on(MESH).items()}
    given = {"make_step": make_step, "mesh": MESH, "state": fsdp_state(MESH), "batch": batch}
    exec(text, given)
    assert given["proof"].verdict == "proved"
