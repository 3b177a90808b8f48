"""Any damage to any file of the newest checkpoint: found, named, and the one before is used."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdist.checkpoint import manifest as manifest_module
from jaxdist.checkpoint.manifest import read_manifest, seal
from jaxdist.checkpoint.restore import committed_steps, restore
from jaxdist.checkpoint.store import CheckpointStore
from jaxdist.errors import CheckpointError


def state(step: int) -> dict[str, jax.Array]:
    return {"w": jax.random.normal(jax.random.key(step), (64, 16)), "step": jnp.int32(step)}


def target() -> Any:
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state(0)
    )


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("pristine") / "checkpoints"
    with CheckpointStore(directory, keep=3, keep_best=False, on_event=pytest.fail) as store:
        for step in (10, 20):
            store.save(step, state(step), metadata={"step": step})
    return directory


@pytest.fixture
def run(pristine: Path, tmp_path: Path) -> Path:
    return shutil.copytree(pristine, tmp_path / "checkpoints")


def files_of(checkpoint: Path) -> list[Path]:
    return sorted(path for path in checkpoint.rglob("*") if path.is_file())


def expect_fallback(directory: Path, named: str, complaint: str = "") -> None:
    """Step 20 is refused aloud, naming the file, and step 10 loads bit for bit."""
    events: list[str] = []
    restored = restore(directory, target(), on_event=events.append)
    assert (restored.step, restored.metadata) == (10, {"step": 10})
    assert np.asarray(restored.state["w"]).tobytes() == np.asarray(state(10)["w"]).tobytes()
    assert len(events) == 1
    for part in ["step_00000020 is damaged", named, complaint, "trying step 10 next"]:
        assert part in events[0]


def flip(path: Path, rng: random.Random) -> None:
    data = bytearray(path.read_bytes())
    bit = rng.randrange(8 * len(data))
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def truncate(path: Path, rng: random.Random) -> None:
    os.truncate(path, rng.randrange(path.stat().st_size))


def extend(path: Path, rng: random.Random) -> None:
    with path.open("ab") as file:
        file.write(rng.randbytes(rng.randint(1, 9)))


def zero(path: Path, rng: random.Random) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def remove(path: Path, rng: random.Random) -> None:
    path.unlink()


@pytest.mark.parametrize("damage", [flip, truncate, extend, zero, remove])
@pytest.mark.every(3)
def test_each_file_damaged_in_each_way(
    run: Path, damage: Callable[[Path, random.Random], None]
) -> None:
    rng = random.Random(damage.__name__)
    newest = run / "step_00000020"
    files = files_of(newest)
    assert {"manifest.json", "metadata.json", "_METADATA"} <= {path.name for path in files}
    for path in files:
        original = path.read_bytes()
        damage(path, rng)
        expect_fallback(run, path.relative_to(newest).as_posix())
        path.write_bytes(original)
    assert restore(run, target(), on_event=pytest.fail).step == 20


def test_every_bit_of_the_manifest_and_random_bits_of_the_rest(run: Path) -> None:
    rng = random.Random(0)
    newest = run / "step_00000020"
    path = newest / "manifest.json"
    original = path.read_bytes()
    for bit in rng.sample(range(8 * len(original)), 500):
        data = bytearray(original)
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        assert committed_steps(run) == (10,), f"bit {bit}"
    path.write_bytes(original)
    manifest = read_manifest(newest)
    for _ in range(100):
        path = rng.choice(files_of(newest)[:-2])
        original = path.read_bytes()
        flip(path, rng)
        with pytest.raises(manifest_module.DamageError, match=path.name):
            manifest_module.check_files(newest, manifest)
        path.write_bytes(original)


def test_the_complaints(run: Path) -> None:
    newest = run / "step_00000020"
    extend(newest / "metadata.json", random.Random(0))
    expect_fallback(run, "metadata.json: ", " bytes, but 12 bytes were written")
    (newest / "metadata.json").unlink()
    expect_fallback(run, "metadata.json: missing")
    (newest / "metadata.json").mkdir()
    expect_fallback(run, "metadata.json: it is a directory, not a regular file")
    shutil.rmtree(newest / "arrays")
    expect_fallback(run, "more; trying step 10 next")
    (newest / "manifest.json").unlink()
    expect_fallback(run, "manifest.json: missing")


@pytest.mark.parametrize(
    ("replace", "complaint"),
    [
        (os.mkfifo, "metadata.json: it is a pipe, not a regular file"),
        (lambda path: path.symlink_to("/dev/zero"), "metadata.json: it is a device"),
    ],
)
def test_a_file_that_would_never_end_is_passed_over(
    run: Path, replace: Callable[[Path], None], complaint: str
) -> None:
    path = run / "step_00000020" / "metadata.json"
    path.unlink()
    replace(path)
    expect_fallback(run, complaint)
    manifest = run / "step_00000020" / "manifest.json"
    manifest.unlink()
    replace(manifest)
    expect_fallback(run, complaint.replace("metadata", "manifest"))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[" * 100_000, "nested too deeply"),
        ("[]", "does not contain a mapping"),
        ("{", "metadata.json: "),
    ],
)
def test_metadata_of_another_kind_is_passed_over(run: Path, text: str, complaint: str) -> None:
    """Also where the manifest says that it should be so."""
    newest = run / "step_00000020"
    leaves = read_manifest(newest).leaves
    (newest / "manifest.json").unlink()
    (newest / "metadata.json").write_text(text)
    seal(newest, step=20, metric=None, leaves=leaves)
    expect_fallback(run, complaint)


def test_an_asked_step_that_is_damaged_is_an_error_without_fallback(run: Path) -> None:
    (run / "step_00000020" / "metadata.json").unlink()
    with pytest.raises(CheckpointError, match=r"step 20: metadata.json: missing\nleave the step"):
        restore(run, target(), step=20, on_event=pytest.fail)


def test_all_damaged_lists_each(run: Path) -> None:
    (run / "step_00000020" / "metadata.json").unlink()
    truncate(run / "step_00000010" / "manifest.json", random.Random(0))
    events: list[str] = []
    with pytest.raises(CheckpointError) as caught:
        restore(run, target(), on_event=events.append)
    assert "step 20: metadata.json: missing" in str(caught.value)
    assert "step 10: manifest.json: the content does not match" in str(caught.value)
    assert len(events) == 2
    assert "there is no other checkpoint to try" in events[1]


def test_a_checkpoint_under_another_steps_name(run: Path) -> None:
    os.rename(run / "step_00000020", run / "step_00000030")
    events: list[str] = []
    assert restore(run, target(), on_event=events.append).step == 10
    assert "the manifest belongs to step 20, but the name of its directory" in events[0]


# Reads that are still under way when orbax gives up end in a thread of tensorstore's, unheard.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_what_orbax_cannot_read_is_passed_over_too(run: Path) -> None:
    newest = run / "step_00000020"
    leaves = read_manifest(newest).leaves
    (newest / "manifest.json").unlink()
    (newest / "arrays" / "manifest.ocdbt").write_bytes(b"not OCDBT")
    seal(newest, step=20, metric=None, leaves=leaves)
    expect_fallback(run, "arrays: ")


def forge(checkpoint: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Write a manifest with a right digest over wrong content."""
    content = json.loads((checkpoint / "manifest.json").read_bytes())["manifest"]
    change(content)
    wrapped = manifest_module._wrap(json.dumps(content).encode())
    (checkpoint / "manifest.json").write_bytes(wrapped)


@pytest.mark.parametrize("name", ["/etc/passwd", "../step_00000010/metadata.json", "a/../../b", ""])
def test_a_manifest_that_points_outside_is_refused(run: Path, name: str) -> None:
    def point_outside(content: dict[str, Any]) -> None:
        content["files"][name] = content["files"]["metadata.json"]

    forge(run / "step_00000020", point_outside)
    expect_fallback(run, f"{name!r} is not a path inside the checkpoint")


@pytest.mark.parametrize(
    ("field", "value", "complaint"),
    [("format", 5, "format"), ("step", -1, "step"), ("leaves", [], "leaves"), ("x", 1, "x")],
)
def test_a_manifest_of_another_format_is_refused(
    run: Path, field: str, value: Any, complaint: str
) -> None:
    forge(run / "step_00000020", lambda content: content.update({field: value}))
    expect_fallback(run, f"manifest.json: 1 validation error for Manifest {complaint}")


def test_torn_directories_are_named_when_the_store_opens_and_never_count(run: Path) -> None:
    (run / "step_00000020" / "manifest.json").unlink()
    (run / "step_00000005").mkdir()
    events: list[str] = []
    with CheckpointStore(run, keep=1, keep_best=False, on_event=events.append) as store:
        assert store.steps() == (10,)
        assert ["step_00000005 has no valid" in e for e in events] == [True, False]
        assert "step_00000020 has no valid manifest" in events[1]
        store.save(20, state(20), metadata={})
        assert store.restore(target()).step == 20
    assert store.steps() == (20,)
