"""`jaxdist.fit`: a run as one call in this process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from runs import DIGITS, QUICK, Jaxdist, assert_same_run, metrics, steps

import jaxdist as jd
from jaxdist.errors import ConfigError

SHORT = {**DIGITS, "train": {"steps": 6, "batch_size": 64, "log_every": 1}}


class Net(nnx.Module):
    """A model of a notebook."""

    def __init__(self, rngs: nnx.Rngs, width: int = 16) -> None:
        self.up, self.down = nnx.Linear(64, width, rngs=rngs), nnx.Linear(width, 10, rngs=rngs)

    def __call__(self, image: jax.Array) -> jax.Array:
        rows = image.reshape(len(image), -1).astype("float32") / 16
        return self.down(nnx.relu(self.up(rows)))


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXDIST_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


@pytest.mark.full
def test_it_is_the_run_of_the_command(jaxdist: Jaxdist, capsys: pytest.CaptureFixture[str]):
    jaxdist.config(SHORT)
    done = jaxdist.here("train", "config.yaml", "run.directory=theirs")
    assert (done.code, done.err) == (0, ""), done
    found = jd.fit("config.yaml", ["run.directory=ours"])
    assert capsys.readouterr().out.count("done   step 6") == 1
    assert_same_run(found.directory, Path("theirs"))
    assert (found.step, found.stopped_by, found.exit_code) == (6, None, 0)
    assert found.directory == Path("ours")
    last = metrics(found.directory)
    assert found.metrics["loss"] == [r["loss"] for r in last if r["split"] == "train"][-1]
    assert found.heldout["loss"] == [r["loss"] for r in last if r["split"] == "heldout"][-1]
    assert found.records()[-1]["split"] == "goodput"
    assert int(found.state.step) == 6
    means = found.experiment.program.metrics
    assert "loss" in means


@pytest.mark.full
def test_a_dict_a_config_and_a_file_are_the_same_run(jaxdist: Jaxdist):
    jaxdist.config(SHORT)
    _, config = jd.load("config.yaml")
    given: list[Any] = ["config.yaml", SHORT, config]
    found = [jd.fit(one, [f"run.directory=run_{at}"], quiet=True) for at, one in enumerate(given)]
    for other in found[1:]:
        assert_same_run(other.directory, found[0].directory)


@pytest.mark.slow
def test_a_config_without_a_file_has_a_directory_of_its_own_name():
    short = {**SHORT, "train": {"steps": 2, "batch_size": 64}}
    assert jd.fit(short, quiet=True).directory == Path("runs/fit")
    assert jd.fit(short, quiet=True).directory == Path("runs/fit-2")


# A run that goes on in another process: test_resume.py; what `fit` gives back: the test above.
@pytest.mark.slow
def test_it_goes_on_in_the_same_process(jaxdist: Jaxdist):
    jaxdist.config(SHORT)
    whole = jd.fit("config.yaml", ["run.directory=whole"], quiet=True)
    half = jd.fit("config.yaml", ["train.steps=3"], quiet=True)
    again = jd.fit("config.yaml", resume=True, quiet=True)
    assert again.directory == half.directory
    assert (half.step, again.step) == (3, 6)
    assert [a["loss"] for a in metrics(again.directory) if a["split"] == "train"] == [
        b["loss"] for b in metrics(whole.directory) if b["split"] == "train"
    ]
    done = jd.fit("config.yaml", resume=True, quiet=True)  # nothing is left to do
    assert done.metrics["loss"] == again.metrics["loss"]
    for ours, theirs in zip(jax.tree.leaves(done.state), jax.tree.leaves(whole.state), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.full
def test_classes_and_functions_of_a_notebook(capsys: pytest.CaptureFixture[str]):
    own = {
        **SHORT,
        "model": {"type": "import", "path": Net, "args": {"width": 8}},
        "loss": {"type": "classification"},
    }
    found = jd.fit(own, quiet=True)
    assert f"path: {__name__}:Net" in (found.directory / "config.yaml").read_text()
    assert steps(found.directory) == [6]


def test_what_has_no_name_cannot_be_resumed_and_is_refused():
    def local(rngs: nnx.Rngs) -> Net:
        return Net(rngs)

    for build in (local, lambda rngs: Net(rngs)):
        own = {**SHORT, "model": {"type": "import", "path": build}}
        with pytest.raises(
            ConfigError, match=r"model\.path = .*Define the object at the top level"
        ):
            jd.fit(own)
    with pytest.raises(ConfigError, match=r"model\.hidden = .*this is a ndarray"):
        jd.fit({**SHORT, "model": {"type": "mlp", "hidden": np.ones(1)}})
    with pytest.raises(ConfigError, match="a key must be text, not 1"):
        jd.fit({1: 2})  # pyright: ignore[reportArgumentType]
    assert not Path("runs").exists()


def test_a_mistake_is_an_error_of_a_config_from_python():
    with pytest.raises(ConfigError, match=r"mesh\.tensr = 2 \(a config from Python\)"):
        jd.fit({**SHORT, "mesh": {"tensr": 2}})


@pytest.mark.full
def test_on_some_of_the_devices():
    found = jd.fit({**SHORT, "mesh": {"data": 2}}, devices=jax.devices()[:2], quiet=True)
    assert found.experiment.layout.mesh.devices.size == 2


def test_fake_devices_that_are_not_there_are_refused():
    with pytest.raises(jd.JaxdistError, match="fake devices were requested after jax was imported"):
        jd.fit(SHORT, devices=4, quiet=True)


def test_what_it_leaves_behind(monkeypatch: pytest.MonkeyPatch):
    """Handlers, the compilation cache and threads are as they were, also after an error."""
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)

    def seen() -> Any:
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
        threads = {t.name for t in threading.enumerate() if t.name in ("signals", "run-lock")}
        settings: Any = jax.config
        # Libraries set these two variables when they are first imported, which `fit` may cause.
        imported = {"GRPC_VERBOSITY", "CRC32C_SW_MODE"}
        environ = {name: os.environ[name] for name in os.environ.keys() - imported}
        cache = settings.jax_compilation_cache_dir, environ, Path.cwd()
        return [signal.getsignal(number) for number in numbers], threads, cache

    before = seen()
    jd.fit(SHORT, quiet=True)
    assert seen() == before
    with pytest.raises(jd.JaxdistError):
        jd.fit({**SHORT, "train": {"steps": 6, "batch_size": 63}}, quiet=True)
    assert seen() == before


@pytest.mark.full
def test_in_a_thread_of_a_notebook():
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(jd.fit(SHORT, quiet=True)))
    thread.start()
    thread.join()
    assert found[0].step == 6


@pytest.mark.full
def test_a_fresh_python_needs_no_preparation(tmp_path: Path, compiled: Path):
    """Fake devices are there though `jax` was never prepared; a hook may be defined first."""
    code = f"""
import sys
import jaxdist
class Quiet(jaxdist.Hook):
    def step(self, run, step, metrics):
        print("step", step)
assert "jax" not in sys.modules
found = jaxdist.fit({SHORT!r}, ["train.steps=2"], hooks=[Quiet()], devices=4, quiet=True)
print(found.experiment.layout.mesh.devices.size, "devices")
"""
    foreign = ("XLA_FLAGS", "NPROC", "JAX_PLATFORMS")
    environ = {key: value for key, value in os.environ.items() if key not in foreign}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env={**environ, "JAX_COMPILATION_CACHE_DIR": str(compiled), "XLA_FLAGS": QUICK},
        cwd=tmp_path, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.stdout.splitlines() == ["step 1", "step 2", "4 devices"], done.stderr


@pytest.mark.full
def test_the_config_of_a_run_is_a_config(jaxdist: Jaxdist):
    """What `fit` got as a dict the command continues."""
    found = jd.fit(SHORT, ["train.steps=3", "run.directory=mine"], quiet=True)
    config = str(found.directory / "config.yaml")
    done = jaxdist.here("train", config, "--resume", "train.steps=4")
    assert done.code == 0, done
    assert "resume from step 3 of 4" in done.out
    assert json.loads((found.directory / "run.json").read_text())["asked"] == "mine"
