"""Checkpoints of a ZeRO 3 that misplaced shards are refused, and no others."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxdist.checkpoint import manifest
from jaxdist.checkpoint.store import CheckpointStore
from jaxdist.errors import CheckpointError
from jaxdist.run.directory import RunDirectory, prepare_directory
from jaxdist.run.loading.misordered import check_order

TWICE, ONCE = P(None, ("tensor", "data")), P("data", "tensor")


def run(path, monkeypatch, *, spec, reduce, written_in):
    """A run directory with a checkpoint whose parameter `w` and moment of it lie as `spec` says."""
    directory = RunDirectory(path)
    prepare_directory(directory, f"parallel:\n  reduce: {reduce}\n")

    class Earlier(manifest.Manifest):
        format: int = written_in

    monkeypatch.setattr(manifest, "Manifest", Earlier)
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), devices=jax.devices()[:4])
    arrays = {"w": jax.device_put(np.ones((4, 8), np.float32), NamedSharding(mesh, spec))}
    others = {
        "opt_state": {"mu": {"w": jax.device_put(np.ones(8), NamedSharding(mesh, P("data")))}}
    }
    with CheckpointStore(directory.checkpoints, keep=1, keep_best=False, on_event=print) as store:
        store.save(3, {**others, "params": arrays}, metadata={})
    monkeypatch.undo()
    return directory


def test_a_checkpoint_of_misplaced_shards_is_refused(tmp_path, monkeypatch):
    directory = run(tmp_path, monkeypatch, spec=TWICE, reduce="{type: ring}", written_in=1)
    with pytest.raises(
        CheckpointError, match=r"step_00000003 contains .* a different order .*\(w\)\. The"
    ):
        check_order(directory, 3)


@pytest.mark.parametrize(
    ("spec", "reduce", "written_in"),
    [(ONCE, "{type: ring}", 1), (TWICE, "null", 1), (TWICE, "{type: ring}", 2)],
    ids=["each dim over one axis", "XLA's reduction", "a later format"],
)
def test_all_others_are_read(spec, reduce, written_in, tmp_path, monkeypatch):
    check_order(run(tmp_path, monkeypatch, spec=spec, reduce=reduce, written_in=written_in), 3)
