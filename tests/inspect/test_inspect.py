"""`jaxdist inspect` on real programs: shipped configs, on fake devices and for TPUs."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from ledgers import GPT
from rich.console import Console
from runs import DIGITS, Jaxdist

from jaxdist.errors import ConfigError, JaxdistError, RunError
from jaxdist.inspect.diff import Difference
from jaxdist.inspect.program import Inspection
from jaxdist.inspect.report import inspect

QUICKSTART = Path(__file__).parents[2] / "configs/gpt/quickstart.yaml"
MESH = ("mesh.data=4", "mesh.tensor=2")


BOUND = "Bound of data: one all-reduce of the gradients in "


class Looked:
    """One call of `inspect`, and what it printed and wrote."""

    def __init__(self, folder: Path, path: Path, *overrides: str, **options: Any) -> None:
        out, file = io.StringIO(), folder / "report.json"
        console = Console(file=out, width=80, highlight=False)
        self.result = inspect(path, overrides, json_file=file, console=console, **options)
        self.out = " ".join(out.getvalue().split())
        self.json = json.loads(file.read_text())

    @property
    def one(self) -> Inspection:
        assert isinstance(self.result, Inspection)
        return self.result

    @property
    def two(self) -> Difference:
        assert isinstance(self.result, Difference)
        return self.result


@pytest.fixture
def digits(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(json.dumps({**DIGITS, "mesh": {"data": -1}}))
    return path


def axis(looked: Looked, *names: str) -> dict[str, Any]:
    (found,) = (row for row in looked.json["axes"] if row["axes"] == list(names))
    return found


def test_the_quickstart_on_eight_devices(tmp_path: Path) -> None:
    looked = Looked(tmp_path, QUICKSTART, *MESH)
    assert looked.json["devices"] == {"kind": "cpu", "count": 8, "axes": {"data": 4, "tensor": 2}}
    # The tied embedding's gradients, as table and as head, are reduced one by one: 0.08 MB more.
    data = axis(looked, "data")
    assert data["lower_bound_bytes"] == 2 * 3 / 4 * 870_912
    assert 1 <= data["ratio"] < 1.1
    assert axis(looked, "tensor")["lower_bound_bytes"] is None
    assert looked.json["flops"]["ratio"] == pytest.approx(1, abs=0.01)
    assert looked.json["memory"]["arguments"]["parameters_bytes"] == 870_912
    assert {"jax", "jaxlib", "python", "jaxdist"} <= set(looked.json["versions"])
    ledger = looked.json["ledger"]
    assert sum(c["times_high"] * c["sent_bytes"] for c in ledger["collectives"]) == pytest.approx(
        sum(row["sent_bytes"] for row in looked.json["collectives"])
    )
    assert "mesh {data: 4, tensor: 2} on 8 x cpu" in looked.out
    assert "434,816 parameters" in looked.out
    assert f"{BOUND}float32" in looked.out
    assert "It leaves out" not in looked.out
    assert "of bound" in looked.out
    assert "of ideal" in looked.out


@pytest.mark.slow
@pytest.mark.needs_libtpu
def test_the_quickstart_for_tpus(tmp_path: Path) -> None:
    looked = Looked(tmp_path, QUICKSTART, *MESH, "model.compute_dtype=bfloat16", topology="v5e:2x4")
    assert looked.json["devices"]["kind"] == "TPU v5 lite"
    data = axis(looked, "data")
    assert "bf16" in data["dtypes"]
    assert data["lower_bound_bytes"] == 3 / 4 * 870_912
    assert 1 <= data["ratio"] < 1.3
    assert looked.json["flops"]["ratio"] == pytest.approx(1, abs=0.02)
    assert looked.json["memory"]["device_bytes"] == int(15.75 * 2**30)
    assert looked.json["memory"]["peak_bytes"] > looked.json["memory"]["argument_bytes"]


@pytest.mark.full
@pytest.mark.needs_libtpu
def test_the_program_for_tpus_has_state_and_parameters_in_the_hosts_memory(
    tmp_path: Path,
) -> None:
    path, zero = (
        QUICKSTART.parents[1] / "mlp/digits.yaml",
        "parallel.zero={stage: 1, offload: true, offload_parameters: ['*kernel']}",
    )
    looked = Looked(tmp_path, path, zero, topology="v5e:2x4")
    memory = looked.json["memory"]
    state, parameters = memory["host_state_bytes"], memory["host_parameter_bytes"]
    held, arguments = state + parameters, sum(memory["arguments"].values())
    assert min(state, parameters) > 0
    # Tiles pad the arrays.
    assert 0 < held <= memory["host_bytes"] < 1.5 * held
    assert arguments <= memory["argument_bytes"] < arguments + held
    assert memory["arguments"]["optimizer_state_bytes"] < held / 4
    assert memory["host_copied_bytes"] == 2 * state + 3 * parameters
    assert memory["host_seconds"] == pytest.approx(memory["host_copied_bytes"] / 1.6e10)
    assert "The host's memory holds" in looked.out


@pytest.mark.slow
@pytest.mark.needs_libtpu
def test_a_narrow_and_shallow_program_of_the_job_on_cifar_for_tpus(tmp_path: Path) -> None:
    data = "data={type: synthetic, kind: images}"
    # All 16 blocks of ResNet-50 take libtpu more than three minutes.
    shape = ["depth=null", "blocks=[1, 1]", "bottleneck=true", "width=16"]
    path = QUICKSTART.parents[1] / "resnet/cifar.yaml"
    looked = Looked(tmp_path, path, data, *(f"model.{one}" for one in shape), topology="v5e:2x4")
    assert looked.json["flops"]["ratio"] == pytest.approx(1, abs=0.03)
    # The statistics of batch norms are a fifth of what so small a network sends.
    assert 1 <= axis(looked, "data")["ratio"] < 1.25


def test_a_ring_sends_its_bound(tmp_path: Path, digits: Path) -> None:
    looked = Looked(tmp_path, digits, "parallel.reduce={type: ring}")
    (ring,) = (r for r in looked.json["collectives"] if r["kind"] == "collective-permute")
    assert ring["sent_bytes"] / axis(looked, "data")["lower_bound_bytes"] == pytest.approx(1, 0.01)


@pytest.mark.full
def test_remat_shows_in_the_flops(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(json.dumps(GPT))
    looked = Looked(tmp_path, path, "model.remat=full")
    assert 1.2 < looked.json["flops"]["ratio"] < 1.4


@pytest.mark.parametrize(
    ("change", "verdict", "words"),
    [
        ("train.log_every=7", "same program", "This setting changed nothing"),
        ("optim.learning_rate=0.5", "same numbers", "but only in instructions"),
        ("train.batch_size=128", "different", "Changes on each device"),
    ],
)
def test_what_a_setting_changes(
    tmp_path: Path, digits: Path, change: str, verdict: str, words: str
) -> None:
    looked = Looked(tmp_path, digits, changes=[change])
    assert looked.two.verdict == looked.json["diff"]["verdict"] == verdict
    assert words in looked.out
    assert looked.json["after"]["config"].endswith(change)


def test_two_files_with_other_numbers_of_devices(tmp_path: Path, digits: Path) -> None:
    other = tmp_path / "other.yaml"
    other.write_text("include: config.yaml\nmesh: {data: 4, fake_devices: 4}\n")
    looked = Looked(tmp_path, digits, other=other)
    changes = {
        (c["of"], c["what"]): (c["before"], c["after"]) for c in looked.json["diff"]["changes"]
    }
    assert changes["mesh", "axes"] == ("{data: 8}", "{data: 4}")
    before, after = changes["data: all-reduce", "sent_bytes"]
    assert before / after == pytest.approx((7 / 8) / (3 / 4))
    assert (
        looked.json["before"]["memory"]["arguments"]["batch_bytes"] * 2
        == (looked.json["after"]["memory"]["arguments"]["batch_bytes"])
    )


@pytest.mark.parametrize(
    ("options", "error", "parts"),
    [
        ({"topology": "v5f:2x4"}, JaxdistError, ["v5f", "v5e:2x4"]),
        pytest.param({"topology": "v5e:2x2", "overrides": ["mesh.data=3"]}, ConfigError,
         ["mesh {data: 3} needs 3 devices, but there are 4"], marks=pytest.mark.needs_libtpu),
        ({"other": "none.yaml"}, ConfigError, ["none.yaml: no such file"]),
        ({"changes": ["model.hidde=[3]"]}, ConfigError, ["did you mean 'hidden'?"]),
        pytest.param({"topology": "v5e:2x2", "overrides": ["model.hidden=[60000, 60000]"]},
         RunError, ["config.yaml model.hidden=[60000, 60000]: the train step needs",
         "a TPU v5 lite has 16.9 GB", "parameters 14.4 GB, optimizer state 28.8 GB",
         "mesh axis tensor"], marks=pytest.mark.needs_libtpu),
        ({"json_file": "none/report.json"}, RunError,
         ["cannot write the inspection to none/report.json: No such file", "another file"]),
    ],
)  # fmt: skip
def test_refused(
    digits: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    error: type[Exception],
    parts: list[str],
) -> None:
    monkeypatch.chdir(digits.parent)
    paths = {k: Path(v) for k, v in options.items() if k in ("other", "json_file")}
    with pytest.raises(error) as raised:
        inspect(Path("config.yaml"), console=Console(quiet=True), **{**options, **paths})
    for part in parts:
        assert part in str(raised.value)


def test_both_are_checked_before_either_is_compiled(
    digits: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "jaxdist.inspect.report.inspect_step", lambda subject: pytest.fail("compiled")
    )
    with pytest.raises(ConfigError, match="needs 3 devices"):
        inspect(digits, changes=["mesh.data=3"], console=Console(quiet=True))


@pytest.mark.full
def test_the_command(jaxdist: Jaxdist) -> None:
    jaxdist.config()
    done = jaxdist(
        "inspect", "config.yaml", "mesh.data=4", "--set", "mesh.tensor=2", "--devices", 8,
        "--json", "report.json",
    )  # fmt: skip
    assert (done.code, done.err) == (0, ""), done
    assert "mesh   {data: 4, tensor: 2} on 8 x cpu" in done.out
    assert max(map(len, done.out.splitlines())) <= 80
    assert json.loads((jaxdist.folder / "report.json").read_text())["devices"]["count"] == 8


@pytest.mark.full
def test_the_command_compares_more_devices_than_the_first_has(jaxdist: Jaxdist) -> None:
    jaxdist.config()
    done = jaxdist("inspect", "config.yaml", "--devices", 2, "--diff-set", "mesh.fake_devices=4")
    assert done.code == 0, done
    assert "{data: 4}" in done.out


@pytest.mark.needs_libtpu
@pytest.mark.full
def test_the_command_for_tpus_needs_no_devices(jaxdist: Jaxdist) -> None:
    jaxdist.config(mesh={"data": 4, "fake_devices": 3})
    done = jaxdist("inspect", "config.yaml", "--topology", "v5e:2x2")
    assert (done.code, done.err) == (0, ""), done
    assert "{data: 4} on 4 x TPU v5 lite" in done.out


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--devices", 4, "--topology", "v5e:2x4"],
         ["error: --devices 4 compiles for CPUs, but --topology v5e:2x4 compiles"]),
        (["--diff", "none.yaml"], ["error: none.yaml: no such file"]),
        (["--plot", "there"], ["error: --plot draws the predicted step", "add --topology"]),
        (["--diff-set", "nothing"], ["error:", "nothing"]),
        (["--set", "nosuch.key=1"], ["1 problem in config.yaml", "nosuch"]),
    ],
)  # fmt: skip
def test_the_command_refuses(jaxdist: Jaxdist, arguments: list[object], parts: list[str]) -> None:
    jaxdist.config()
    refused = jaxdist.here("inspect", "config.yaml", *arguments)
    assert refused.code == 2, refused
    for part in parts:
        assert part in refused.message


def test_one_worker_of_a_parameter_server_and_its_servers(tmp_path: Path) -> None:
    """Adam's moments are on the servers; a push of each worker comes in at each, in a clock."""
    servers = {"type": "parameter_server", "workers": 4, "servers": 2}
    path = tmp_path / "config.yaml"
    path.write_text(json.dumps({**DIGITS, "mesh": {"data": -1}, "strategy": servers}))
    found = Looked(tmp_path, path, "train.batch_size=64", "optim.type=adamw")
    whole = Looked(
        tmp_path, path, "train.batch_size=64", "optim.type=adamw", "strategy={type: synchronous}"
    )
    assert "16 of 64 examples: one worker's part" in found.out
    assert "plan fullest server: 0" in found.out  # how parameters were shared out
    memory, rows = found.json["memory"]["arguments"], found.json["servers"]
    assert memory["optimizer_state_bytes"] == 0
    params = sum(row["parameter_bytes"] for row in rows)
    assert params == memory["parameters_bytes"]
    for row in rows:
        size = row["parameter_bytes"]
        assert row["received_bytes"] == row["sent_bytes"] == 4 * size
        assert 2 * size <= row["optimizer_bytes"] < 2 * size + 64
    assert found.json["flops"]["ideal"] == whole.json["flops"]["ideal"] / 4
    assert whole.json["servers"] is None
