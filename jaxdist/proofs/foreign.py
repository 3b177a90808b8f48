"""`jaxdist.prove`: the proof of a training step that the user has written without jaxdist."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxdist.errors import RunError, first_line
from jaxdist.metrics.report import write_json
from jaxdist.parity.states import FULL, NUDGES, leaves_by_name, nudged_tree
from jaxdist.parity.trace import Trace, limit_of
from jaxdist.proofs.certificate import Proof, identity, to_json
from jaxdist.proofs.numbers import RESUMED, Compared, apart, scenes, worst_of
from jaxdist.proofs.sent import compare
from jaxdist.proofs.types.check import check_types
from jaxdist.proofs.types.jaxprs import regions_of
from jaxdist.trees import flatten_with_names
from jaxdist.types import PyTree

Step = Callable[[PyTree, PyTree], tuple[PyTree, PyTree]]
INPUTS = "pass the whole state of training as the first argument, and return it first"
MUTABLE = f"{INPUTS}; a step that changes flax.nnx objects in place needs nnx.split and nnx.merge"
STATEFUL = (
    "a second trace of the step gives another program, because the step changes Python objects "
    "that it uses; pass these objects as arrays in the state"
)
UNKNOWN_SCALE = (
    "no step on one device was passed (one_device=), so only a different order of the examples "
    "was compared; a factor that is the same for every batch shows only in the types"
)


def prove(
    step: Step,
    mesh: Mesh,
    state: PyTree,
    batch: PyTree,
    *,
    one_device: Step | None = None,
    weight: str | None = None,
    seed: int = 0,
    json_file: str | os.PathLike[str] | None = None,
) -> Proof:
    """Prove that a step on a mesh computes what a single device would, and return the results.

    `print` shows the result as a table. The step is run with copies of the arguments, so that the
    step may donate its arguments.

    Args:
      step: a function (state, batch) -> (state, outputs), jitted or not.
      mesh: the mesh that the step is written for.
      state: the step's first argument: arrays with the shardings in which training stores them.
      batch: the step's second argument: arrays `[B, ...]` with an entry for each example.
      one_device: the step for a single device, whose numbers are taken to be right. If None, the
        step is compared with itself on rows in another order. The proof then does not decide
        whether all results are wrong by the same factor.
      weight: the name of the leaf of `batch` with the weights of examples, float `[B]`, or None if
        examples have no weights. With a name, the proof also compares batches with unequal weights,
        with a shard whose weights are 0, and with weights that are all 0.
      seed: the seed of the weights and of the order of examples.
      json_file: a file to which the certificate is written, or None to write no certificate.

    Raises:
      RunError: the step cannot be traced, or does not return its state; the batch or the mesh does
        not fit the step; or the certificate cannot be written.
    """
    closed, names = _traced(step, mesh, state, batch, one_device)
    jitted, alone = _jitted(step), _jitted(one_device)
    found = _compared(jitted, alone, mesh, (state, batch), weight, seed)
    again, _ = _program("the step", step, state, batch)
    unknown = {
        "the scale": UNKNOWN_SCALE if alone is None and not found.undecided else "",
        "later steps": "" if _text(again) == _text(closed) else STATEFUL,
    }
    others = [Compared(name, undecided=why) for name, why in unknown.items() if why]
    sent = compare(closed, jitted.lower(state, batch).compile(), mesh, state)
    leaves = tuple(name for name, _ in flatten_with_names(state))
    proof = Proof(check_types(closed, names), (found, *others), (), sent, seed, leaves=leaves)
    if json_file is not None:
        valid = identity(str(closed), dict(mesh.shape))
        certificate = to_json(proof, valid, str(getattr(step, "__name__", step)))
        write_json(Path(json_file), certificate, what="certificate")
    return proof


def _jitted(step: Step | None) -> Any:
    return step if step is None or hasattr(step, "lower") else jax.jit(step)


def _require(condition: bool, otherwise: str) -> None:
    if not condition:
        raise RunError(f"prove: {otherwise}")


class _Returned(NamedTuple):
    """The values that a traced step of the user returns."""

    state: PyTree
    outputs: PyTree


def _program(name: str, step: Step, state: PyTree, batch: PyTree) -> tuple[Any, _Returned]:
    """Return the program of a step, as `jax.make_jaxpr` traces it, and the shapes of its results.

    Raises:
      RunError: the step cannot be traced, or does not return two values.
    """
    try:
        # A new function is traced each time, since jax caches the program of a function.
        closed, out = jax.make_jaxpr(lambda *given: step(*given), return_shape=True)(state, batch)
    except Exception as error:
        raise RunError(
            f"prove: {name} cannot be traced ({type(error).__name__}: {first_line(error)}); "
            f"first call step(state, batch) with these arguments, without prove; {INPUTS}"
        ) from error
    pair = isinstance(out, tuple) and len(out) == 2
    _require(pair, f"{name} returns {type(out).__name__}, not two values: {MUTABLE}")
    return closed, _Returned(*out)


def _require_alike(told: str, made: PyTree, wanted: PyTree) -> None:
    """Raise an error with names and shapes if the arrays of two trees differ.

    Args:
      told: the beginning of the message, with the reason why the trees must be alike.
      made: the tree to check.
      wanted: the tree with the required names and shapes.
    """
    trees = (flatten_with_names(tree) for tree in (made, wanted))
    ours, theirs = ({f"{name} {np.shape(x)}" for name, x in tree} for tree in trees)
    added, lost = (", ".join(sorted(n)[:3]) or "nothing" for n in (ours - theirs, theirs - ours))
    _require(ours == theirs, f"{told}: {added} instead of {lost}")


def _text(closed: Any) -> str:
    # The addresses of functions are removed, since they differ between equal programs.
    return re.sub(r"0x[0-9a-f]+", "", str(closed))


def _traced(
    step: Step, mesh: Mesh, state: PyTree, batch: PyTree, one_device: Step | None
) -> tuple[Any, Sequence[str]]:
    """Return the program of a step, as `jax.make_jaxpr` traces it, and the names of its outputs.

    Raises:
      RunError: a step cannot be traced, returns no pair of a state and outputs, or is for another
        mesh; `one_device` returns other arrays; or an argument is not an array, was deleted, or is
        not on the devices of the mesh.
    """
    _require(isinstance(mesh, Mesh), f"mesh must be a jax.sharding.Mesh, not {type(mesh).__name__}")
    for name, leaf in [*flatten_with_names(state), *flatten_with_names(batch)]:
        is_array = isinstance(leaf, jax.Array | np.ndarray | np.generic | int | float)
        _require(is_array, f"{name} is {type(leaf).__name__}, not an array: {MUTABLE}")
        deleted = isinstance(leaf, jax.Array) and leaf.is_deleted()
        _require(not deleted, f"{name} was donated to an earlier step: pass a copy of it")
    _require(any(map(np.ndim, jax.tree.leaves(batch))), "the batch has no array of examples")
    closed, out = _program("the step", step, state, batch)
    given = out._replace(state=state)
    _require_alike(f"the step returns another state than it gets ({MUTABLE})", out, given)
    if one_device is not None:
        theirs = _program("one_device", one_device, *jax.tree.map(_host, (state, batch)))[1]
        _require_alike("one_device returns other arrays than the step", theirs, out)
    used = [dict(region.params["mesh"].shape) for region in regions_of(closed.jaxpr)]
    arrays = [leaf for leaf in jax.tree.leaves((state, batch)) if isinstance(leaf, jax.Array)]
    on_mesh = any(leaf.sharding.device_set == {*mesh.devices.flat} for leaf in arrays)
    _require(
        bool(used) or mesh.size == 1 or on_mesh,
        f"neither state nor batch is on the {mesh.size} devices of the mesh, so the step would run "
        "on a single device: place state and batch as in training (jax.device_put with a "
        "NamedSharding)",
    )
    for shape in used:
        _require(
            shape == dict(mesh.shape),
            f"the step's shard_map is for the mesh {shape}, but the argument mesh is "
            f"{dict(mesh.shape)}: pass the mesh for which the step is written",
        )
    return closed, [name for name, _ in flatten_with_names(out)]


def _compared(
    step: Step,
    one_device: Step | None,
    mesh: Mesh,
    placed: tuple[PyTree, PyTree],
    weight: str | None,
    seed: int,
) -> Compared:
    """Compare a step with a step for a single device, and return the comparison.

    Without `one_device` the step is compared with itself on rows in another order. The result is
    undecided if the arrays of the batch differ in their leading dim, or if a step fails.

    Args:
      placed: the state and the batch with their shardings; for other arguments see `prove`.
    """
    host = begun, batch = jax.tree.map(_host, placed)
    sizes = {np.shape(leaf)[:1] for leaf in jax.tree.leaves(batch)}
    if len(sizes) > 1:
        why = "the arrays of the batch differ in their leading dim: pass arrays [B, ...]"
        return Compared("the given batch", undecided=why)
    ((rows,),) = sizes
    batches = _batches(batch, rows, mesh.size, weight, seed)
    plan, reference, theirs, like = "one device", one_device, batches, host
    if reference is None:
        order = np.random.default_rng(seed).permutation(rows)
        theirs = {name: _ordered(batch, order) for name, batch in batches.items()}
        plan, reference, like = "rows in another order", step, placed
    begins = begun, *(nudged_tree(begun, FULL, nudge) for nudge in NUDGES)
    try:
        found = _run(step, begun, batches, placed)
        expected = [_run(reference, one, theirs, like) for one in begins]
    except (ValueError, TypeError, jax.errors.JaxRuntimeError) as error:
        return Compared(
            plan,
            undecided=f"the step failed: {first_line(error)}; run it once on the given state and "
            "batch, and fix the error",
        )
    cuts = ["over devices", *(axis for axis, size in mesh.shape.items() if size > 1)]
    worst = worst_of((*batches,), found, *expected, limit=limit_of(cuts, rows))
    return Compared(plan, worst, steps=(*batches,))


def _batches(
    batch: PyTree, rows: int, devices: int, weight: str | None, seed: int
) -> dict[str, PyTree]:
    """Return a batch for each step, by the step's name.

    Args:
      batch: the given batch on the host, with `rows` examples.
      devices: the number of devices, which need not divide the number of rows.
      weight, seed: see `prove`.

    Raises:
      RunError: the batch has no leaf with the name of the weights.
    """
    names = [name for name, _ in flatten_with_names(batch)]
    known = weight is None or weight in names
    _require(known, f"the batch has no {weight!r}; choose weight from {sorted(names)}")
    shards = next(n for n in range(devices, 0, -1) if rows % n == 0)
    scened = scenes(rows, shards, weighted=weight is not None, skips=False, seed=seed)
    taken = {"first step": None, **scened}
    # The step gets a name that differs from its name in `scenes`: here no state is saved and loaded
    # before the step.
    taken["third step"] = taken.pop(RESUMED)
    random, found = np.random.default_rng(seed), {}
    for index, (name, weights) in enumerate(taken.items()):
        order = random.permutation(rows) if index else np.arange(rows)
        leaves, tree = jax.tree.flatten(_ordered(batch, order))
        if weights is not None:
            at = names.index(str(weight))
            wide = weights.reshape(-1, *(1,) * (leaves[at].ndim - 1))
            leaves[at] = np.broadcast_to(wide, leaves[at].shape).astype(leaves[at].dtype)
        found[name] = jax.tree.unflatten(tree, leaves)
    return found


def _run(step: Step, begun: PyTree, batches: Mapping[str, PyTree], like: PyTree) -> list[Trace]:
    """Take a step with each batch, and return the results of each step.

    Args:
      step: the step function.
      begun: the initial state on the host.
      batches: the batches by the names of the steps.
      like: a state and a batch whose arrays have the shardings of the step's arguments.
    """
    state, before, traces = _placed(begun, like[0]), leaves_by_name(_without_keys(begun)), []
    for batch in batches.values():
        state, outputs = step(state, _placed(batch, like[1]))
        held = _without_keys(state)
        after, values = leaves_by_name(held), leaves_by_name(_without_keys(outputs))
        updates = {name: after[name] - before[name] for name in after}
        traces.append(Trace(values | apart(held), updates=updates))
        before = after
    return traces


def _ordered(batch: PyTree, order: np.ndarray) -> PyTree:
    return jax.tree.map(lambda leaf: leaf[order], batch)


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(getattr(leaf, "dtype", np.float32), jax.dtypes.prng_key)


def _without_keys(tree: PyTree) -> PyTree:
    """Return a tree with the data of each random key instead of the key."""
    return jax.tree.map(lambda leaf: jax.random.key_data(leaf) if _is_key(leaf) else leaf, tree)


def _host(leaf: Any) -> Any:
    if not _is_key(leaf):
        return np.array(leaf)
    # Random keys cannot become numpy arrays, so their data are copied.
    data = np.array(jax.random.key_data(leaf))
    return jax.random.wrap_key_data(jnp.asarray(data), impl=jax.random.key_impl(leaf))


def _placed(tree: PyTree, like: PyTree) -> PyTree:
    """Return copies of a tree's arrays, with the shardings of the arrays in `like`.

    If an array of `like` is on a single device, jit chooses the sharding of its copy.
    """

    def placed(leaf: Any, given: Any) -> Any:
        whole = jnp.array(leaf)
        # Jit may place an uncommitted array wherever the step needs it.
        if not isinstance(given, jax.Array) or len(given.sharding.device_set) == 1:
            return whole
        return jax.device_put(whole, given.sharding)

    return jax.tree.map(placed, tree, like)
