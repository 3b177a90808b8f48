"""`jaxdist.prove`: the proof of a training step that the user has written without jaxdist."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxdist.errors import JaxdistError, RunError
from jaxdist.metrics.report import write_json
from jaxdist.parity.draw.run import replicas_apart
from jaxdist.parity.trace import FULL, NUDGES, Trace, limit_of, nudged_tree
from jaxdist.proofs.certificate import Proof, Undecided, identity, to_json
from jaxdist.proofs.numbers import Compared, Scene, scenes, worst_of
from jaxdist.proofs.sent import Sent, compare
from jaxdist.proofs.types.check import check_types
from jaxdist.proofs.types.jaxprs import regions_of
from jaxdist.trees import flatten_with_names
from jaxdist.types import PyTree

Step = Callable[[PyTree, PyTree], tuple[PyTree, PyTree]]
INPUTS = "pass the whole state of training as the first argument, and return it first"
MUTABLE = f"{INPUTS}; a step that changes flax.nnx objects in place needs nnx.split and nnx.merge"
UNKNOWN_SCALE = (
    "no step on one device was given (one_device=), so that only another order of the rows was "
    "compared; a factor that is the same for every batch shows only in the types"
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

    `print` shows the result as a table. The step is run with copies of the arguments, so that it
    may donate them.

    Args:
      step: a function (state, batch) -> (state, outputs), jitted or not.
      mesh: the mesh that the step is written for.
      state: the step's first argument: arrays with the shardings in which training stores them.
      batch: the step's second argument: arrays `[B, ...]` with an entry for each example.
      one_device: the same step for a single device, whose numbers are taken to be right. If None,
        the step is compared with itself on rows in another order, and the scale is undecided.
      weight: the name of the leaf of `batch` with the weights of examples, float `[B]`, or None.
        With a name, the proof also compares batches with unequal weights, with a shard whose
        weights are 0, and with weights that are all 0.
      seed: the seed of the weights and of the order of examples.
      json_file: a file to which the certificate is written, or None to write no certificate.

    Raises:
      RunError: the step cannot be traced, or does not return its state; the batch or the mesh does
        not fit the step; or the certificate cannot be written.
    """
    closed, names = _traced(step, mesh, state, batch)
    typed = check_types(closed, names)
    jitted, whole = _jitted(step), one_device and _jitted(one_device)
    found = _Runner(mesh, state, batch, weight, seed).compare(jitted, whole)
    others: list[Undecided] = []
    if not found.undecided and one_device is None:
        others.append(Undecided("numbers", "the scale", UNKNOWN_SCALE))
    sent: Sent | None = None
    try:
        sent = compare(closed, jitted.lower(state, batch).compile(), mesh, state)
    except JaxdistError as error:
        others.append(Undecided("bytes", "the step", str(error)))
    leaves = tuple(name for name, _ in flatten_with_names(state))
    proof = Proof(typed, (found,), (), sent, tuple(others), seed, leaves=leaves)
    if json_file is not None:
        name = str(getattr(step, "__name__", step))
        valid = identity(str(closed), dict(mesh.shape))
        write_json(Path(json_file), to_json(proof, valid, name), what="certificate")
    return proof


def _jitted(step: Step) -> Any:
    return step if hasattr(step, "lower") else jax.jit(step)


def _traced(step: Step, mesh: Mesh, state: PyTree, batch: PyTree) -> tuple[Any, Sequence[str]]:
    """Return the program of a step, as `jax.make_jaxpr` traces it, and the names of its outputs.

    Raises:
      RunError: the step cannot be traced, returns no pair of a state and outputs, or is for another
        mesh; or an argument is not an array, or is not on the devices of the mesh.
    """
    for name, leaf in [*flatten_with_names(state), *flatten_with_names(batch)]:
        if not isinstance(leaf, jax.Array | np.ndarray | np.generic | int | float):
            raise RunError(f"prove: {name} is {type(leaf).__name__}, not an array: {MUTABLE}")
    try:
        closed, out = jax.make_jaxpr(step, return_shape=True)(state, batch)
    except Exception as error:
        first = next(iter(str(error).splitlines()), "")
        raise RunError(
            f"prove: the step cannot be traced ({type(error).__name__}: {first}): call it as "
            f"step(state, batch) with these arguments first; {INPUTS}"
        ) from error
    if not isinstance(out, tuple) or len(out) != 2:
        raise RunError(f"prove: the step returns {type(out).__name__}, not two values: {MUTABLE}")
    if jax.tree.structure(out[0]) != jax.tree.structure(state):
        raise RunError(
            f"prove: the step returns a tree of another structure than the state: {MUTABLE}"
        )
    for (name, old), new in zip(flatten_with_names(state), jax.tree.leaves(out[0]), strict=True):
        if np.shape(old) != new.shape:
            raise RunError(f"prove: {name} is {np.shape(old)}, but the step returns {new.shape}")
    used = [dict(region.params["mesh"].shape) for region in regions_of(closed.jaxpr)]
    devices = {*mesh.devices.flat}
    given = [leaf for leaf in jax.tree.leaves((state, batch)) if isinstance(leaf, jax.Array)]
    if not used and mesh.size > 1 and all(one.sharding.device_set != devices for one in given):
        raise RunError(
            f"prove: neither state nor batch is on the {mesh.size} devices of the mesh, so that "
            "the step would run on one: place them as training does (jax.device_put with a "
            "NamedSharding)"
        )
    for shape in used:
        if shape != dict(mesh.shape):
            raise RunError(
                f"prove: the step's shard_map is for the mesh {shape}, but mesh is "
                f"{dict(mesh.shape)}: give the mesh that the step is written for"
            )
    outputs = [f"outputs/{name}" for name, _ in flatten_with_names(out[1])]
    return closed, [*(f"state/{name}" for name, _ in flatten_with_names(out[0])), *outputs]


@dataclass(frozen=True)
class _Runner:
    """The execution of a step and of its reference, with the same initial state and batches.

    The fields are arguments of `prove`.
    """

    mesh: Mesh
    state: PyTree
    batch: PyTree
    weight: str | None
    seed: int

    def compare(self, step: Step, one_device: Step | None) -> Compared:
        """Compare a step with a step for a single device, and return the comparison.

        Without `one_device` the step is compared with itself on rows in another order. The result
        is undecided if the arrays of the batch differ in their leading dim, or if a step fails.
        """
        batches = self._batches()
        if isinstance(batches, str):
            return Compared("the given batch", undecided=batches)
        whole, reference, theirs = one_device is not None, one_device or step, batches
        if not whole:
            order = np.random.default_rng(self.seed).permutation(self._rows)
            theirs = [(name, _ordered(host, order)) for name, host in batches]
        plan = "one device" if whole else "rows in another order"
        host = jax.tree.map(_host, self.state)
        try:
            found = self._run(step, host, batches, alone=False)
            expected, *moved = (
                self._run(reference, begun, theirs, alone=whole)
                for begun in (host, *(nudged_tree(host, FULL, seed) for seed in NUDGES))
            )
        except (ValueError, TypeError, jax.errors.JaxRuntimeError) as error:
            return Compared(plan, undecided=f"a step failed: {str(error).splitlines()[0]}")
        cuts = ["over devices", *(axis for axis, size in self.mesh.shape.items() if size > 1)]
        names = [name for name, _ in batches]
        worst = worst_of(names, found, expected, moved, limit_of(cuts, self._rows))
        return Compared(plan, worst, steps=tuple(names))

    @property
    def _rows(self) -> int:
        return min(np.shape(leaf)[0] for leaf in jax.tree.leaves(self.batch) if np.ndim(leaf))

    def _batches(self) -> list[tuple[str, PyTree]] | str:
        """Return pairs of a name and a batch, one pair for each step.

        If the arrays of the batch differ in their leading dim, the result is the reason as text.
        """
        host = jax.tree.map(_host, self.batch)
        named, rows = dict(flatten_with_names(host)), self._rows
        if any(np.ndim(leaf) == 0 or len(leaf) != rows for leaf in named.values()):
            return "the arrays of the batch differ in their leading dim"
        taken = [Scene(name) for name in ("first step", "second step", "third step")]
        if self.weight is not None:
            if self.weight not in named:
                raise RunError(
                    f"prove: the batch has no {self.weight!r}; choose weight from {sorted(named)}"
                )
            # The devices of the mesh need not divide the number of rows.
            shards = next(n for n in range(self.mesh.size, 0, -1) if rows % n == 0)
            unequal = scenes(rows, shards, weighted=True, skips=False, seed=self.seed)
            taken = [*taken[:1], *unequal]
        random = np.random.default_rng(self.seed)
        found = []
        for index, scene in enumerate(taken):
            order = random.permutation(rows) if index else np.arange(rows)
            leaves, tree = jax.tree.flatten(_ordered(host, order))
            if scene.weights is not None:
                at = [*named].index(str(self.weight))
                wide = scene.weights.reshape(-1, *(1,) * (leaves[at].ndim - 1))
                leaves[at] = np.broadcast_to(wide, leaves[at].shape).astype(leaves[at].dtype)
            found.append((scene.name, jax.tree.unflatten(tree, leaves)))
        return found

    def _run(
        self, step: Step, begun: PyTree, batches: Sequence[tuple[str, PyTree]], *, alone: bool
    ) -> list[Trace]:
        """Take a step with each batch, and return the results of each step.

        Args:
          step: the step function.
          begun: the initial state on the host.
          batches: pairs of a name and a batch.
          alone: whether the step is for a single device, so that its arguments get no shardings.
        """
        state, before, traces = _like(begun, self.state, alone=alone), _numbers(begun), []
        for _, batch in batches:
            state, outputs = step(state, _like(batch, self.batch, alone=alone))
            after, values = _numbers(state), _numbers(outputs)
            held = {n: x for n, x in flatten_with_names(state) if not (alone or _is_key(x))}
            apart, leaf = replicas_apart(held)
            extra = {f"replicas of {leaf}": np.asarray(apart)} if apart else {}
            updates = {name: after[name] - before[name] for name in after}
            traces.append(Trace(begun, np.zeros(0), {}, updates, {**values, **extra}))
            before = after
        return traces


def _ordered(batch: PyTree, order: np.ndarray) -> PyTree:
    return jax.tree.map(lambda leaf: leaf[order], batch)


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(getattr(leaf, "dtype", np.float32), jax.dtypes.prng_key)


def _host(leaf: Any) -> Any:
    return leaf if _is_key(leaf) else np.array(leaf)  # keys cannot become numpy arrays


def _like(tree: PyTree, given: PyTree, *, alone: bool) -> PyTree:
    """Return copies of a tree's arrays, with the shardings of the arrays in `given`.

    With `alone`, and for arrays that `given` has on a single device, jit chooses the sharding.
    """

    def placed(leaf: Any, like: Any) -> Any:
        whole = jnp.copy(leaf) if isinstance(leaf, jax.Array) else jnp.asarray(np.array(leaf))
        # Jit may place an uncommitted array wherever the step needs it.
        if alone or not isinstance(like, jax.Array) or len(like.sharding.device_set) == 1:
            return whole
        return jax.device_put(whole, like.sharding)

    return jax.tree.map(placed, tree, given)


def _numbers(tree: PyTree) -> dict[str, np.ndarray]:
    """Return the leaves of a tree by name, as float64 arrays on the host.

    For a random key the result has the key's data.
    """
    return {
        name: np.asarray(jax.random.key_data(leaf) if _is_key(leaf) else leaf, np.float64)
        for name, leaf in flatten_with_names(tree)
    }
