"""Snapshots on a machine's own disk: used where they are the newest, and none that is damaged."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from runs import DIGITS, Jaxdist, checkpoint

from jaxdist.checkpoint.layout import step_directory

ARGS = ("train", "config.yaml", "--devices", 8)


@pytest.fixture
def crashed(jaxdist: Jaxdist) -> tuple[Path, dict[str, bytes]]:
    """A run that has lost its last of three checkpoints, at step 24; and its last state."""
    jaxdist.config(DIGITS, checkpoint={"keep": 9, "local": {"directory": "ssd", "every": 5}})
    done = jaxdist.here(*ARGS)
    assert done.code == 0, done
    whole = checkpoint(jaxdist.run, 24)
    shutil.rmtree(step_directory(jaxdist.run / "checkpoints", 24))
    (folder,) = (jaxdist.folder / "ssd").iterdir()
    assert [path.name for path in sorted(folder.iterdir())] == [
        "run", "step_00000015.0_of_1", "step_00000020.0_of_1"
    ]  # fmt: skip
    return folder, {name: array.tobytes() for name, array in whole.items()}


@pytest.mark.full
def test_the_newest_tier_is_gone_on_from_to_the_bit(jaxdist: Jaxdist, crashed):
    folder, whole = crashed
    done = jaxdist.here(*ARGS, "--resume")
    assert done.code == 0, done
    assert "resume from step 20 of 24, kept on this machine's disk" in done.out
    found = checkpoint(jaxdist.run, 24)
    assert {name: array.tobytes() for name, array in found.items()} == whole
    fresh = jaxdist.here(*ARGS, "train.steps=3")  # another run, which must not meet these
    assert fresh.code == 0, fresh
    assert not folder.exists()  # its newest checkpoint is as new as they were
    (own,) = (jaxdist.folder / "ssd").iterdir()
    assert own.name.startswith("config-2-")


@pytest.mark.slow
def test_one_that_is_damaged_is_passed_over_loudly(jaxdist: Jaxdist, crashed):
    folder, whole = crashed
    path = folder / "step_00000020.0_of_1"
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    done = jaxdist.here(*ARGS, "--resume")
    assert done.code == 0, done
    said = " ".join(done.out.split())
    assert "skipped on this machine's disk: snapshot step_00000020.0_of_1: the content" in said
    assert "resume from step 16 of 24" in said
    found = checkpoint(jaxdist.run, 24)
    assert {name: array.tobytes() for name, array in found.items()} == whole
    shutil.rmtree(jaxdist.run / "checkpoints")
    config = (jaxdist.run / "config.yaml").read_bytes()
    other = jaxdist.here(*ARGS, "--resume", "model.hidden=[9]")
    assert (
        "snapshots up to step 20, which do not fit the changed model: model.hidden" in other.message
    )
    assert (jaxdist.run / "config.yaml").read_bytes() == config
