"""Which GPUs each process owns, for jobs of every scheduler as data, and how GPUs are counted."""

# ruff: noqa: N802 (the functions of a driver have the names that its vendor gave them)
from __future__ import annotations

import ctypes
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest
from ruamel.yaml import YAML

from jaxdist.errors import RunError
from jaxdist.runtime import connection, gpus
from jaxdist.runtime.gpu_query import query
from jaxdist.runtime.gpus import Seen, check_started, divide_gpus, gpu_platforms, look
from jaxdist.runtime.processes import Processes, find_processes
from jaxdist.runtime.rendezvous import free_port

JOBS: dict[str, Any] = YAML(typ="safe").load(
    Path(__file__).parent / "environments" / "gpu_jobs.yaml"
)


def environ_of(job: dict[str, Any], process: dict[str, Any]) -> dict[str, str]:
    return {**job["common"], **process["environ"]}


@pytest.mark.parametrize("name", JOBS)
def test_every_gpu_of_a_job_has_one_owner(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    job = JOBS[name]
    seen = []
    for index, process in enumerate(job["processes"]):
        environ = environ_of(job, process)
        found = find_processes(environ, detect=True)
        assert found == Processes(job["found"]["coordinator"], job["found"]["count"], index)
        monkeypatch.setattr(gpus.platform, "node", lambda on=process["on"]: on)
        monkeypatch.setattr(gpus, "_has_driver", lambda platforms: True)
        monkeypatch.setattr(gpus, "_plugins", lambda: ["xla_cuda12"])
        visible = {"gpus": process["sees"], "problem": ""}
        monkeypatch.setattr(gpus, "_query", lambda platform, visible=visible: visible)
        seen.append(look(environ, None))
    if "refused" in job:
        with pytest.raises(RunError) as raised:
            divide_gpus(seen)
        assert job["refused"] in str(raised.value)
    else:
        assert divide_gpus(seen) == [tuple(process["owns"]) for process in job["processes"]]


def node(*visible: str, **changes: Any) -> Seen:
    return Seen("n1", tuple(visible), **changes)


@pytest.mark.parametrize(
    ("seen", "message"),
    [
        ([node("a", "b", "c")] * 2, r"2 processes on n1 \(0 to 1\) see the same 3 GPUs"),
        ([node("a", "b"), node("b", "c")], "processes 0 and 1 on n1 would both own the GPU that"),
        ([node("a"), node()], "process 1 on n1 finds no GPU, but other processes find GPUs"),
        ([node("a"), node(problem="it broke")], "process 1 on n1: it broke; ask the scheduler"),
        ([node("a", "b", chosen=(2,))], "JAX_LOCAL_DEVICE_IDS=2, but the process sees 2 GPUs"),
        ([node("a", chosen=(0, 0))], "processes 0 and 0 on n1 would both own the GPU"),
        ([node("a", "b", chosen=(0,)), node("a", "b")], "process 1 on n1 has no JAX_LOCAL_DEV"),
        ([node("a", "b", chosen=(0,)), node("a", "b", chosen=(0,))], "would both own the GPU"),
    ],
)
def test_gpus_that_would_be_idle_or_shared_are_refused(seen: list[Seen], message: str) -> None:
    with pytest.raises(RunError, match=message):
        divide_gpus(seen)


def test_the_choice_of_the_user_stands() -> None:
    chosen = [node("a", "b", "c", given=3, chosen=(2,)), node("a", "b", "c", given=3, chosen=(0,))]
    assert divide_gpus(chosen) == [(2,), (0,)]


def test_nothing_is_divided_where_there_is_no_gpu() -> None:
    assert divide_gpus([Seen("n1", given=8), Seen("n2")]) == [(), ()]


def test_what_a_process_sees_is_told_as_json_and_read_back() -> None:
    one = node("a", "b", given=2, chosen=(1,))
    assert Seen.read(one.told()) == one
    for other in (None, {"machine": "n1"}, {**one.told(), "given": "many"}):
        with pytest.raises(RunError, match="cannot be read: install the same version"):
            Seen.read(other)


def test_a_choice_that_is_no_number_is_refused() -> None:
    assert look({"JAX_LOCAL_DEVICE_IDS": "3, 1"}, "cpu").chosen == (3, 1)
    with pytest.raises(RunError, match="JAX_LOCAL_DEVICE_IDS='all': write numbers"):
        look({"JAX_LOCAL_DEVICE_IDS": "all"}, "cpu")


@pytest.mark.parametrize(
    ("platforms", "plugins", "found"),
    [
        (None, ["xla_cuda13", "xla_rocm7"], ("cuda", "rocm")),
        ("cuda,cpu", ["xla_cuda13", "xla_rocm7"], ("cuda",)),
        ("gpu", ["xla_rocm7"], ("rocm",)),
        ("cpu", ["xla_cuda13"], ()),
        ("", [], ()),
    ],
)
def test_only_platforms_that_jax_would_start_are_asked(
    platforms: str | None, plugins: list[str], found: tuple[str, ...]
) -> None:
    assert gpu_platforms(platforms, lambda: plugins) == found


class Cuda:
    """A driver as ctypes shows it, with GPUs whose UUIDs are their number, 16 times."""

    def __init__(self, count: int, start: int = 0) -> None:
        self.count, self.start = count, start

    def cuInit(self, flags: int) -> int:
        return self.start

    def cuDeviceGetCount(self, into: Any) -> int:
        into._obj.value = self.count
        return 0

    def cuDeviceGet(self, into: Any, index: int) -> int:
        into._obj.value = index
        return 0

    def cuDeviceGetUuid_v2(self, into: Any, device: ctypes.c_int) -> int:
        into[:] = [device.value] * 16
        return 0


class Hip:
    """A driver of two partitions of one card."""

    def hipGetDeviceCount(self, into: Any) -> int:
        into._obj.value = 2
        return 0

    def hipDeviceGetPCIBusId(self, into: Any, length: int, index: int) -> int:
        into.value = b"0000:c1:00.0"
        return 0

    def hipDeviceGetUuid(self, into: Any, index: int) -> int:
        into[:] = [index + 1] * 16
        return 0


def missing(name: str) -> Any:
    raise OSError(f"{name}: no such file")


def test_a_driver_is_asked_for_the_identities_of_gpus() -> None:
    found = query("cuda", lambda name: Cuda(2))
    assert found == {"gpus": ["00" * 16, "01" * 16], "problem": ""}
    first, second = query("rocm", lambda name: Hip())["gpus"]
    assert first != second
    assert "0000:c1:00.0" in first


@pytest.mark.parametrize(
    ("load", "problem"),
    [
        (lambda name: Cuda(1, start=100), ""),
        (lambda name: Cuda(1, start=999), "libcuda.so.1: cuInit answers with error 999"),
        (missing, "libcuda.so.1 cannot be loaded: libcuda.so.1: no such file"),
    ],
)
def test_a_driver_without_gpus_says_why(load: Any, problem: str) -> None:
    assert query("cuda", load) == {"gpus": [], "problem": problem}


def test_a_driver_that_shows_no_gpu_is_a_problem_unless_they_were_hidden_on_purpose(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gpus, "_has_driver", lambda platforms: True)
    monkeypatch.setattr(gpus, "_plugins", lambda: ["xla_cuda12"])
    monkeypatch.setattr(gpus, "_query", lambda platform: {"gpus": [], "problem": ""})
    problem = look({}, None).problem
    assert problem.startswith("the driver of cuda is loaded, but no GPU is visible: check")
    assert look({"CUDA_VISIBLE_DEVICES": ""}, None).problem == ""
    assert look({}, "cpu").problem == ""


def test_a_driver_that_hangs_or_crashes_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = tmp_path / "query.py"
    monkeypatch.setattr(gpus.gpu_query, "__file__", str(script))
    script.write_text("raise SystemExit('it broke')")
    assert gpus._query("cuda")["problem"] == "the driver of cuda cannot list its GPUs: it broke"
    script.write_text("import time; time.sleep(60)")
    monkeypatch.setattr(gpus, "QUERY_SECONDS", 0.2)
    with pytest.raises(
        RunError, match=r"the driver of cuda on .* did not list its GPUs within 0\.2 s"
    ):
        gpus._query("cuda")


def test_the_query_runs_by_its_path_without_the_package() -> None:
    found = gpus._query("rocm")
    assert found["gpus"] or found["problem"]


@pytest.mark.parametrize(
    ("started", "message"),
    [
        (("gpu", 1, 2), r"process 0 of 2 owns 4 of 8 GPUs, but jax has started 1 of 2 devices"),
        (("cpu", 4, 8), "4 of 8 devices of the platform cpu: see jax's own messages"),
        (("gpu", 4, 4), "started 4 of 4 devices of the platform gpu"),
    ],
)
def test_jax_must_have_started_what_was_divided(
    started: tuple[str, int, int], message: str
) -> None:
    with pytest.raises(RunError, match=message):
        check_started("process 0 of 2", (0, 1, 2, 3), 8, *started)


def test_jax_with_other_devices_than_gpus_is_not_checked() -> None:
    check_started("process 0 of 2", (0, 1, 2, 3), 8, "gpu", 4, 8)
    check_started("process 0 of 2", (), 0, "tpu", 4, 8)


@pytest.mark.parametrize(("visible", "stated"), [((), None), (("a", "b"), [0, 1])])
def test_jax_is_told_all_and_detects_nothing(
    visible: tuple[str, ...], stated: list[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under Slurm's variables jax's own detection would keep the GPU number 1 alone."""
    for name, value in environ_of(JOBS[next(iter(JOBS))], {"environ": {}}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SLURM_LOCALID", "1")
    told: dict[str, Any] = {}
    started = SimpleNamespace(
        config=SimpleNamespace(jax_platforms=None),
        distributed=SimpleNamespace(initialize=lambda *_, **given: told.update(given)),
        local_device_count=lambda: len(visible),
        device_count=lambda: len(visible),
        default_backend=lambda: "gpu",
    )
    monkeypatch.setattr(connection, "jax", started)
    monkeypatch.setattr(connection.gpus, "look", lambda *_: Seen("a", visible))
    port = free_port()
    connection._connect(Processes(f"127.0.0.1:{port}", 1, 0), 10, pytest.fail)
    assert told["local_device_ids"] == stated
    assert told["cluster_detection_method"] == "deactivate"


def test_jax_still_has_the_setting_that_is_asked() -> None:
    settings: Any = jax.config
    assert settings.jax_platforms == "cpu"
