"""Large arrays in files of their own: what is written, what is linked, and what a bit flip does."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxdist.checkpoint import pieces
from jaxdist.checkpoint.manifest import read_manifest
from jaxdist.checkpoint.restore import restore
from jaxdist.checkpoint.store import CheckpointStore

CHUNK = 1 << 14
P = PartitionSpec


def on_mesh(*axes: str | None) -> NamedSharding:
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    return NamedSharding(mesh, P(*axes))


def target_of(tree: Any, sharding: Any = None) -> Any:
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding or x.sharding), tree
    )


def saved(directory: Path, *states: Any, **options: Any) -> Path:
    """The states as steps 1, 2 ... of one run."""
    settings: dict[str, Any] = {"keep": 9, "keep_best": False, "on_event": pytest.fail}
    settings["chunk_bytes"] = CHUNK
    with CheckpointStore(directory, **(settings | options)) as store:
        for step, state in enumerate(states, 1):
            store.save(step, state, metadata={})
    return directory


def step(directory: Path, number: int) -> Path:
    return directory / f"step_{number:08d}"


def bytes_of(directory: Path, number: int) -> tuple[int, int]:
    """Of a step's files: those that no step before has, and all."""
    earlier = {
        path.stat().st_ino for n in range(1, number) for path in step(directory, n).rglob("*")
    }
    new: dict[int, int] = {}
    whole = 0
    for path in step(directory, number).rglob("*"):
        if path.is_file():
            whole += path.stat().st_size
            if path.stat().st_ino not in earlier:
                new[path.stat().st_ino] = path.stat().st_size
    return sum(new.values()), whole


@pytest.mark.parametrize(
    ("shape", "axes", "cuts"),
    [
        ((40, 64), (), ((0, 16, 32, 40), (0, 64))),
        ((40, 64), ("data",), ((0, 10, 20, 30, 40), (0, 64))),
        ((40, 64), (None, "tensor"), ((0, 32, 40), (0, 32, 64))),
        ((2, 2, 2000), (), ((0, 1, 2), (0, 1, 2), (0, 1024, 2000))),
        ((1024,), (), ((0, 1024),)),
        ((1023,), (), None),
        ((1024,), ("data",), ((0, 256, 512, 768, 1024),)),
        ((0, 4), (), None),
        ((), (), None),
    ],
)
def test_where_arrays_are_cut(shape: tuple[int, ...], axes: Any, cuts: Any) -> None:
    array = jax.device_put(jnp.zeros(shape, jnp.float32), on_mesh(*axes))
    assert pieces.array_cuts(array, 4096) == cuts


def test_shards_much_smaller_than_a_chunk_are_left_to_orbax() -> None:
    array = jax.device_put(jnp.zeros(4096), on_mesh(("data", "tensor")))
    assert pieces.array_cuts(array, 1 << 14) is not None
    assert pieces.array_cuts(array[:2048], 1 << 14) is None


LAYOUTS: tuple[tuple[Any, ...], ...] = ((), ("data",), (None, "data"), ("tensor", "data"))


@pytest.mark.parametrize("first", LAYOUTS)
@pytest.mark.every(3)
def test_every_layout_loads_into_every_other_to_the_bit(tmp_path: Path, first: Any) -> None:
    tree = {
        "rows": jax.random.normal(jax.random.key(0), (200, 48)),
        "half": jax.random.normal(jax.random.key(1), (120, 160), jnp.bfloat16),
        "keys": jax.random.split(jax.random.key(2), (64, 64)),
        "small": jnp.arange(32.0).reshape(4, 8),
    }
    state = jax.device_put(tree, on_mesh(*first))
    saved(tmp_path, state)
    assert read_manifest(step(tmp_path, 1)).cuts.keys() == {"rows", "half", "keys"}
    for second in LAYOUTS:
        wanted = target_of(tree, on_mesh(*second))
        found = restore(tmp_path, wanted, on_event=pytest.fail).state
        for name, leaf in tree.items():
            assert found[name].sharding.is_equivalent_to(wanted[name].sharding, leaf.ndim)
            raw = [jax.random.key_data(x) if name == "keys" else x for x in (found[name], leaf)]
            np.testing.assert_array_equal(*map(np.asarray, raw))


def test_zeros_fill_up_shards_on_either_side(tmp_path: Path) -> None:
    own = {"w": jax.random.normal(jax.random.key(0), (197, 32))}
    filled = {"w": jnp.pad(own["w"], ((0, 3), (0, 0)))}
    with CheckpointStore(
        tmp_path, keep=9, keep_best=False, chunk_bytes=CHUNK, on_event=pytest.fail
    ) as store:
        store.save(1, filled, metadata={}, shapes=own)
        store.save(2, own, metadata={})
        for number, rows in ((1, 197), (1, 204), (2, 200)):
            target = {"w": jax.ShapeDtypeStruct((rows, 32), "float32", sharding=on_mesh())}
            found = store.restore(target, shapes=own, step=number).state["w"]
            np.testing.assert_array_equal(found[:197], own["w"])
            assert not np.asarray(found[197:]).any()


@pytest.mark.full
def test_nine_tenths_frozen_writes_a_ninth_at_most(tmp_path: Path) -> None:
    """AdamW, moments of the frozen parameters included."""
    keys = jax.random.split(jax.random.key(0), 10)
    params = {f"layer{i}": jax.random.normal(key, (128, 512)) for i, key in enumerate(keys)}
    train = {name: name == "layer9" for name in params}
    optimizer = optax.chain(
        optax.adamw(1e-2, mask=train),
        optax.masked(optax.set_to_zero(), {name: not moved for name, moved in train.items()}),
    )
    states = []
    opt_state = optimizer.init(params)
    update = jax.jit(optimizer.update)
    for number in range(4):
        states.append({"step": jnp.int32(number), "params": params, "opt_state": opt_state})
        grads = {n: jnp.sin(p + number) * train[n] for n, p in params.items()}
        updates, opt_state = update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
    saved(tmp_path, *states)
    for number in (2, 3, 4):
        new, whole = bytes_of(tmp_path, number)
        assert whole > 30 * 128 * 512 * 4
        assert 0.05 < new / whole <= 0.11
        found = restore(tmp_path, target_of(states[0]), step=number, on_event=pytest.fail).state
        jax.tree.map(np.testing.assert_array_equal, found, states[number - 1])


def test_rows_that_are_not_touched_are_not_written(tmp_path: Path) -> None:
    table = jax.random.normal(jax.random.key(0), (50_257 // 8, 64))
    touched = table.at[jnp.array([3, 4, 5000])].add(1.0)
    saved(tmp_path, {"table": table}, {"table": touched})
    new, whole = bytes_of(tmp_path, 2)
    in_two_files = 2 * CHUNK + (step(tmp_path, 2) / "manifest.json").stat().st_size + 2
    assert (new <= in_two_files, whole > table.nbytes) == (True, True)
    found = restore(tmp_path, target_of({"table": table}), on_event=pytest.fail).state["table"]
    np.testing.assert_array_equal(found, touched)


def test_a_run_that_goes_on_links_to_what_it_finds(tmp_path: Path) -> None:
    state = {"w": jax.random.normal(jax.random.key(0), (64, 256))}
    saved(tmp_path, state)
    with CheckpointStore(
        tmp_path, keep=1, keep_best=False, chunk_bytes=CHUNK, on_event=pytest.fail
    ) as store:
        store.save(2, state, metadata={})
        store.wait()
        assert store.steps() == (2,)  # and the files that step 1 had live on
        assert store.restore(target_of(state)).step == 2
        piece = next((step(tmp_path, 2) / "pieces").rglob("0.0"))
        inode = piece.stat().st_ino
        store.save(2, state, metadata={})  # replaces the step it links to
        store.wait()
        assert piece.stat().st_ino == inode
        assert store.restore(target_of(state)).step == 2


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_a_flipped_bit_is_found_in_each_step_that_has_the_file(tmp_path: Path) -> None:
    state = {"w": jax.random.normal(jax.random.key(0), (64, 256))}
    other = {"w": state["w"].at[0].add(1.0)}
    saved(tmp_path, other, state, state)
    piece = "pieces/000000/0.0"
    flip(step(tmp_path, 3) / piece)
    events: list[str] = []
    found = restore(tmp_path, target_of(state), on_event=events.append)
    assert found.step == 1
    for number, event in zip((3, 2), events, strict=True):
        assert f"step_{number:08d} is damaged: {piece}: the content does not match" in event
    # The step after is whole again: what is linked is read before.
    with CheckpointStore(
        tmp_path, keep=9, keep_best=False, chunk_bytes=CHUNK, on_event=events.append
    ) as store:
        store.save(4, state, metadata={})
        found = store.restore(target_of(state))
    assert found.step == 4
    np.testing.assert_array_equal(found.state["w"], state["w"])
    assert events[2:] == [
        f"{step(tmp_path, 3) / piece} is damaged: the file is written again instead of linked"
    ]


def test_without_links_everything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any) -> None:
        raise PermissionError("no links here")

    monkeypatch.setattr(os, "link", refused)
    state = {"w": jax.random.normal(jax.random.key(0), (64, 256))}
    saved(tmp_path, state, state)
    new, whole = bytes_of(tmp_path, 2)
    assert new == whole
    assert restore(tmp_path, target_of(state), on_event=pytest.fail).step == 2


def test_a_checkpoint_without_large_arrays_is_as_it_was_before_there_were_pieces(
    tmp_path: Path,
) -> None:
    state = {"w": jnp.ones((64, 256))}
    saved(tmp_path, state, chunk_bytes=1 << 20)
    text = (step(tmp_path, 1) / "manifest.json").read_text()
    assert '"format":2' in text
    assert "cuts" not in text
    saved(tmp_path, state, state)  # a run that an earlier jaxdist began
    assert read_manifest(step(tmp_path, 2)).format == 3
    assert restore(tmp_path, target_of(state), on_event=pytest.fail).step == 2


@pytest.mark.parametrize("name", ["pieces/000000/0.0", "pieces/000000/32.0"])
def test_a_file_that_is_missing_at_commit_fails_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """As where another process could not write its part."""
    place = pieces.place_pieces

    def lossy(staging: Path, *rest: Any) -> Any:
        records = place(staging, *rest)
        (staging / name).unlink()
        return records

    monkeypatch.setattr(pieces, "place_pieces", lossy)
    with pytest.raises(Exception, match=rf"saving step 1 .*{name}"):
        saved(tmp_path, {"w": jnp.ones((64, 256))})
    assert os.listdir(tmp_path) == []
