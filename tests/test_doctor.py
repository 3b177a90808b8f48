from __future__ import annotations

import dataclasses
import io
import json

import pytest
from rich.console import Console

from jaxdist import doctor
from jaxdist.doctor import facts as facts_module
from jaxdist.doctor.checks import COUNT_FLAG, TIMEOUT_FLAGS, Check, checks
from jaxdist.doctor.facts import (
    COMPANIONS,
    Backend,
    Folder,
    MachineFacts,
    gather_facts,
    look_at,
    probe_backend,
)
from jaxdist.runtime.environment import plan_environment

GIB = 2**30
PRIVATE = Folder("/cache", exists=True, writable=True, mode=0o700, free_bytes=50 * GIB)
TIMEOUTS = " ".join(f"{name}=120" for name in TIMEOUT_FLAGS)

HEALTHY = MachineFacts(
    python="3.12.1",
    python_range=">=3.11,<3.14",
    versions=dict.fromkeys((*COMPANIONS, "scikit-learn", "libtpu", "tensorboard"), "1.0.0"),
    ranges={},
    backend=Backend("cpu", 1, "cpu"),
    environ={},
    planned={"XLA_FLAGS": TIMEOUTS},
    cpus=2,
    cpu_quota=None,
    memory_bytes=24 * GIB,
    available_bytes=20 * GIB,
    open_files=20_000,
    compilation_cache=None,
    cache=PRIVATE,
    nvidia_driver=False,
    fashion_mnist=True,
)


def judged(name: str, **changes) -> Check:
    (check,) = [c for c in checks(dataclasses.replace(HEALTHY, **changes)) if c.name == name]
    return check


def versions(**changes: str | None) -> dict[str, str | None]:
    return {**HEALTHY.versions, **changes}


def flags(text: str, **more: str) -> dict:
    return {"environ": {"XLA_FLAGS": text, **more}, "planned": {"XLA_FLAGS": text, **more}}


def folder(**changes) -> Folder:
    return dataclasses.replace(PRIVATE, **changes)


def test_a_healthy_machine_has_no_remedy_to_take():
    found = checks(HEALTHY)
    assert {check.status for check in found} == {"ok"}
    assert [check for check in found if check.remedy] == []


MANY = f"{COUNT_FLAG}=8 {TIMEOUTS}"
WARNINGS = {
    "jax and jaxlib": (
        {"versions": versions(jax="0.10.2", jaxlib="0.10.1")},
        "jax 0.10.2 runs on jaxlib 0.10.1",
        "'jaxlib==0.10.2'",
    ),
    "accelerator": ({"nvidia_driver": True}, "jax runs on the CPU", "jax[cuda13]"),
    "memory": ({"available_bytes": GIB}, "1.0 GiB free of 24.0 GiB", "smaller model"),
    "cpus": ({"cpus": 64, "cpu_quota": 2.0}, "64 visible, but the container may use 2", "NPROC=2"),
    "fake devices": (
        flags(MANY, NPROC="15"),
        "XLA_FLAGS requests 8 devices, but NPROC is 15",
        "NPROC=16",
    ),
    "XLA_FLAGS": (flags(f"--a=1 --a=2 {TIMEOUTS}"), "--a=1 and --a=2", "only the last"),
    "collective timeout": (
        flags(TIMEOUTS.replace("120", "1800")),
        "only after 1800 s",
        "at most 600",
    ),
    "compilation cache": (
        {"compilation_cache": folder(mode=0o755)},
        "/cache has mode 0755",
        "0700",
    ),
    "jaxdist cache": ({"cache": folder(free_bytes=GIB)}, "1.0 GiB free", "JAXDIST_CACHE"),
    "open files": ({"open_files": 256}, "256", "ulimit -n 4096"),
}


@pytest.mark.parametrize("name", WARNINGS)
def test_what_hurts_a_run_is_a_warning_with_its_remedy(name):
    changes, value, remedy = WARNINGS[name]
    check = judged(name, **changes)
    assert check.status == "warning"
    assert value in check.value
    assert remedy in check.remedy


@pytest.mark.parametrize(
    ("name", "changes", "value", "remedy"),
    [
        ("python", {"python": "3.10.4"}, "3.10.4, but jaxdist needs >=3.11,<3.14", "3.11-3.13"),
        ("python", {"python": "3.14.0"}, "3.14.0, but", "3.11-3.13"),
        ("chex", {"versions": versions(chex=None)}, "not installed", "pip install 'chex'"),
        (
            "jax",
            {"ranges": {"jax": "<0.13,>=0.10"}, "versions": versions(jax="0.9.2", jaxlib="0.9.2")},
            "0.9.2, but jaxdist needs <0.13,>=0.10",
            "pip install 'jax<0.13,>=0.10'",
        ),
        (
            "backend",
            {"backend": Backend(problem="no plugin"), "planned": {"JAX_PLATFORMS": "cuda"}},
            "no plugin",
            "JAX_PLATFORMS is 'cuda'",
        ),
        ("backend", {"backend": Backend(problem="killed")}, "killed", "jax.devices()"),
        ("fake devices", flags(f"{COUNT_FLAG}=many {TIMEOUTS}"), "=many", "whole number"),
    ],
)
def test_what_stops_a_run_is_an_error_with_its_remedy(name, changes, value, remedy):
    check = judged(name, **changes)
    assert check.status == "error"
    assert value in check.value
    assert remedy in check.remedy


@pytest.mark.parametrize(
    ("changes", "value"),
    [
        ({"writable": False}, "/cache cannot be written"),
        ({"exists": False, "mode": None}, "/cache does not exist"),
        ({"mode": 0o701}, "mode 0701"),
    ],
)
def test_a_compilation_cache_must_exist_be_writable_and_private(changes, value):
    check = judged("compilation cache", compilation_cache=folder(**changes))
    assert check.status == "warning"
    assert value in check.value
    assert judged("compilation cache", compilation_cache=PRIVATE).status == "ok"


def test_without_a_folder_of_jax_programs_are_in_the_jaxdist_cache():
    assert "jaxdist cache" in judged("compilation cache", compilation_cache=None).value


def test_an_unwritable_jaxdist_cache_is_a_warning():
    assert "cannot be written" in judged("jaxdist cache", cache=folder(writable=False)).value


def test_timeouts_that_are_missing_or_no_number_are_a_warning():
    for text in ("", TIMEOUTS.replace("120", "soon"), TIMEOUTS.split()[0]):
        check = judged("collective timeout", **flags(text))
        assert check.status == "warning"
        assert "the loss of another process hangs the run" in check.remedy


def test_prerelease_and_four_part_versions_are_taken_and_jaxlib_follows_three_parts():
    changes = {
        "ranges": {"jax": "<0.13,>=0.10"},
        "versions": versions(jax="0.12.0.1", jaxlib="0.12.0"),
    }
    assert judged("jax", **changes).status == "ok"
    assert "jax and jaxlib" not in {c.name for c in checks(dataclasses.replace(HEALTHY, **changes))}
    assert judged("jax", **changes | {"versions": versions(jax="0.12.0rc1")}).status == "ok"


@pytest.mark.parametrize("devices", [1, 2, 8, 512])
def test_what_jaxdist_itself_plans_is_found_healthy(devices):
    planned = plan_environment({}, fake_devices=devices)
    check = judged("fake devices", planned=planned)
    assert check.status == "ok"
    assert check.value.startswith(f"{devices}, ")
    assert judged("collective timeout", planned=planned) == Check(
        "collective timeout", "ok", "120 s"
    )


def test_a_gpu_in_use_or_not_wanted_is_no_warning():
    gpu = Backend("gpu", 1, "NVIDIA H200", device_memory_bytes=100 * GIB)
    for changes in ({"backend": gpu}, {"planned": {"JAX_PLATFORMS": "cpu"}}):
        found = checks(dataclasses.replace(HEALTHY, nvidia_driver=True, **changes))
        assert "accelerator" not in {check.name for check in found}
    assert judged("backend", backend=gpu).value == "1 x gpu (NVIDIA H200)"
    assert judged("memory", backend=gpu).value.endswith("100.0 GiB per device")


def test_a_missing_extra_is_no_warning_but_says_how_to_get_it():
    check = judged("libtpu", versions=versions(libtpu=None))
    assert (check.status, check.value) == ("ok", "not installed (optional)")
    assert "jaxdist[tpu]" in check.remedy
    assert "dataset-fashion-mnist" in judged("fashion-mnist", fashion_mnist=False).remedy


def test_printed_lines_fit_80_columns_with_the_remedy_below():
    console = Console(file=io.StringIO(), width=80)
    broken = dataclasses.replace(HEALTHY, python="3.10.4", open_files=256, **flags(MANY))
    doctor.show_checks(checks(broken), console)
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert " ".join(lines[0].split()) == "error python 3.10.4, but jaxdist needs >=3.11,<3.14"
    assert lines[1].strip() == "-> install Python 3.11-3.13"
    assert lines[-1].endswith("2 warnings, 1 error")
    assert "[" not in console.file.getvalue()  # nothing but text where there is no terminal


@pytest.mark.parametrize(("python", "code"), [("3.12.1", 0), ("3.10.4", 1)])
def test_exit_code_and_json(monkeypatch, python, code):
    faulty = dataclasses.replace(HEALTHY, python=python, open_files=256)
    monkeypatch.setattr(doctor, "gather_facts", lambda devices: faulty)
    console = Console(file=io.StringIO(), width=20)
    assert doctor.main(as_json=True, console=console) == code
    assert isinstance(console.file, io.StringIO)
    told = json.loads(console.file.getvalue())
    assert told["schema"] == 1
    assert [Check(**record) for record in told["checks"]] == checks(faulty)


def test_this_machine_is_read_and_judged_with_fake_devices():
    facts = gather_facts(devices=4)
    assert (facts.backend.platform, facts.backend.device_count) == ("cpu", 4)
    assert facts.backend.problem == ""
    assert facts.ranges["jax"] == "<0.13,>=0.10"
    errors = [check for check in checks(facts) if check.status == "error"]
    assert errors == []


def test_a_backend_that_crashes_or_hangs_is_a_finding(monkeypatch):
    unknown = probe_backend({**facts_module.os.environ, "XLA_FLAGS": "--xla_no_such_flag=1"})
    assert unknown.problem == "Unknown flag in XLA_FLAGS: --xla_no_such_flag=1"
    assert "remove it from XLA_FLAGS" in judged("backend", backend=unknown).remedy
    monkeypatch.setattr(facts_module, "_PROBE", "import time; time.sleep(60)")
    hung = probe_backend(dict(facts_module.os.environ), timeout_seconds=0.2)
    assert hung.problem == "jax gave no answer within 0.2 s"
    monkeypatch.setattr(facts_module, "_PROBE", "import os; os.abort()")
    assert probe_backend(dict(facts_module.os.environ)).problem == "exit code -6"


def test_a_folder_that_does_not_exist_is_judged_by_its_parent(tmp_path):
    inside = look_at(tmp_path / "a" / "b")
    assert (inside.exists, inside.writable, inside.mode) == (False, True, None)
    (tmp_path / "file").write_text("")
    assert look_at(tmp_path / "file" / "b").writable is False
    tmp_path.chmod(0o750)
    assert look_at(tmp_path).mode == 0o750


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"cpu.max": "150000 100000"}, 1.5),
        ({"cpu.max": "max 100000"}, None),
        ({"cpu/cpu.cfs_quota_us": "200000", "cpu/cpu.cfs_period_us": "100000"}, 2.0),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ({}, None),
    ],
)
def test_the_cpu_quota_of_a_container(tmp_path, files, quota):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    assert facts_module._cpu_quota(tmp_path) == quota
