"""Servers on machines of their own, on GKE and on Ray; nothing is submitted."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ruamel.yaml import YAML

from jaxdist.errors import ConfigError, RunError
from jaxdist.launch import ray_job
from jaxdist.launch.build import engine
from jaxdist.launch.contract import Job

JOB = Job(
    "clicks.yaml",
    (),
    "clicks",
    "jaxdist.cli",
    nodes=2,
    folder=Path("/shared/work"),
    servers=2,
    server_nodes=2,
    run="/data/runs/clicks",
)
GKE = ("image=there/it:1", "gpus_per_node=8", "volume={claim: shared}")
POOL = (
    "servers.cpu=8",
    "servers.memory=64Gi",
    "servers.node_selector={cloud.google.com/gke-nodepool: cpus}",
)


def rendered(on: str, *settings: str, **changes: Any) -> Any:
    one, job = engine(on, settings), replace(JOB, **changes)
    one.check(job)
    return one.render(job, Path("launch"))


def jobs_of(*settings: str, **changes: Any) -> tuple[Any, Any]:
    text = rendered("gke", *settings, **changes).files["jobset.yaml"]
    assert "&id" not in text, "kubectl reads references, but a user should not have to"
    found = YAML(typ="safe").load(text)
    return found, {one["name"]: one for one in found["spec"]["replicatedJobs"]}


def test_servers_are_pods_on_a_pool_of_nodes_with_cpus() -> None:
    _, jobs = jobs_of(*GKE, *POOL, "environment.A=b")
    slices, servers = (jobs[name]["template"]["spec"] for name in ("slice", "serve"))
    assert [one["parallelism"] for one in (slices, servers)] == [2, 2]
    pod = servers["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["nodeSelector"] == {"cloud.google.com/gke-nodepool": "cpus"}
    assert "nodeSelector" not in slices["template"]["spec"]
    assert container["resources"] == {"limits": {"cpu": "8", "memory": "64Gi"}}
    assert container["env"] == [
        {"name": "JAX_PLATFORMS", "value": "cpu"},
        {"name": "A", "value": "b"},
    ]
    assert container["command"] == [
        "jaxdist", "servers", "/data/runs/clicks", "--here", "--wait", "600",
        "--host", "clicks-serve-0-$(JOB_COMPLETION_INDEX).clicks.default.svc",
    ]  # fmt: skip
    assert {"name": "data", "mountPath": "/data"} in container["volumeMounts"]
    (trains,) = slices["template"]["spec"]["containers"]
    assert "strategy.processes.host=clicks-slice-0-0.clicks.default.svc" in trains["command"]


def test_kubernetes_restarts_a_pod_of_a_server_alone_and_the_run_ends_the_set() -> None:
    found, jobs = jobs_of(*GKE, "restarts=3")
    slices, servers = (jobs[name]["template"]["spec"] for name in ("slice", "serve"))
    assert (slices["backoffLimit"], servers["backoffLimit"]) == (0, 3)
    assert servers["template"]["spec"]["restartPolicy"] == "Never"
    disrupted = [{"type": "DisruptionTarget", "status": "True"}]
    assert servers["podFailurePolicy"]["rules"] == [
        {"action": "Ignore", "onPodConditions": disrupted}
    ]
    done = {"operator": "All", "targetReplicatedJobs": ["slice"]}
    assert found["spec"]["successPolicy"] == done


def test_kubernetes_restarts_a_worker_of_servers_alone() -> None:
    """Process 0 too: the run then continues from its newest checkpoint, and all others join it."""
    _, jobs = jobs_of(*GKE, "restarts=3", apart=True)
    slices, servers = (jobs[name]["template"]["spec"] for name in ("slice", "serve"))
    assert "backoffLimit" not in slices
    assert slices["successPolicy"] == {"rules": [{"succeededIndexes": "0"}]}
    assert slices["backoffLimitPerIndex"] == 3
    assert slices["podFailurePolicy"] == servers["podFailurePolicy"]
    own = "strategy.processes.host=clicks-slice-0-0.clicks.default.svc"
    for nodes, reached in ((2, True), (1, False)):
        _, jobs = jobs_of(*GKE, apart=True, servers=0, nodes=nodes)
        (container,) = jobs["slice"]["template"]["spec"]["template"]["spec"]["containers"]
        assert (own in container["command"]) is reached


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("settings", [GKE, ("image=a", "tpu=v5p:4x4x4", GKE[-1], *POOL)])
def test_kubernetes_takes_the_job_of_servers(settings: tuple[str, ...], apart: bool) -> None:
    validate = pytest.importorskip("kubernetes_validate").validate
    found, jobs = jobs_of(*settings, nodes=1, apart=apart)
    assert found["spec"].keys() == {
        "failurePolicy", "network", "replicatedJobs", "successPolicy",
    }  # fmt: skip
    for name, job in jobs.items():
        names = {"name": f"{found['metadata']['name']}-{name}-0"}
        whole = {"apiVersion": "batch/v1", "kind": "Job", "metadata": names, **job["template"]}
        validate(whole, "1.33", strict=True)


@pytest.mark.parametrize(
    ("settings", "changes", "message"),
    [
        (GKE[:2], {}, "--servers 2: the servers find the run by its directory, .*set volume"),
        (GKE, {"run": "runs/clicks"}, "do not see run.directory runs/clicks: .* below /data"),
        (GKE, {"server_nodes": 1}, "a pod runs a single server; use --servers 2"),
        (
            ("image=a", "tpu=v5p:4x4x4", "slices=2", GKE[-1]),
            {"nodes": 1, "apart": True},
            "slices 2: on GKE, the workers of parameter servers run on the hosts of one slice",
        ),
    ],
)
def test_pods_that_servers_cannot_have(
    settings: tuple[str, ...], changes: Any, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        rendered("gke", *settings, **changes)


def test_ray_is_told_the_command_of_servers() -> None:
    found = json.loads(rendered("ray", "servers.cpus=2", server_nodes=1).files["ray.json"])
    assert found["serve"] == {
        "role": "serve", "nodes": 1, "processes": 2,
        "command": ["-P", "-m", "jaxdist.cli", "servers", JOB.run, "--here", "--wait", "600"],
        "cpus": 2,
    }  # fmt: skip
    assert json.loads(rendered("ray", servers=0).files["ray.json"])["serve"] is None


class PlayedRay(SimpleNamespace):
    """The part of Ray that reserves room on nodes, of which the numbers of GPUs are given."""

    def __init__(self, gpus: list[int], ready: bool) -> None:
        super().__init__(asked={}, ready=ready)
        self.all = [
            {"NodeID": f"n{at}", "Alive": at < 3, "Resources": {"GPU": count} if count else {}}
            for at, count in enumerate(gpus)
        ]

    def nodes(self) -> Any:
        return self.all

    def cluster_resources(self) -> Any:
        return {"CPU": 8}

    def placement_group(self, bundles: Any, **more: Any) -> Any:
        self.asked = {"bundles": bundles, **more}
        return SimpleNamespace(wait=lambda seconds: self.ready)


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> Any:
    def reserve(gpus: list[int], *settings: str, ready: bool = True, **changes: Any) -> Any:
        ray = PlayedRay(gpus, ready)
        monkeypatch.setattr(ray_job, "_ray", lambda module="ray": ray)
        told = json.loads(rendered("ray", *settings, **changes).files["ray.json"])
        ray_job._room(told, told["nodes"] * told["processes"])
        return ray.asked

    return reserve


def test_servers_reserve_room_on_nodes_without_gpus(room: Any) -> None:
    asked = room([2, 0, 4, 8], "gpus=1", "servers.cpus=3", server_nodes=1)
    assert asked["bundles"] == [{"CPU": 1.0, "GPU": 1.0}] * 2 + [{"CPU": 6.0}]
    assert asked["bundle_label_selector"] == [{}, {}, {"ray.io/node-id": "!in(n0,n2)"}]
    assert asked["strategy"] == "SPREAD"
    # Without such nodes, or without GPUs, servers may run anywhere.
    assert "bundle_label_selector" not in room([2, 2], "gpus=1")
    assert "bundle_label_selector" not in room([0, 0])
    assert "bundle_label_selector" not in room([2, 0], servers=0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"servers": 0}, r"{'CPU': 1.0} for each of 2 processes were not .* lower cpus or gpus,"),
        (
            {},
            r"and {'CPU': 1.0} for each of 2 machines for servers \(nodes without GPUs\) were not",
        ),
        ({}, "lower cpus, gpus or servers.cpus, or wait longer"),
    ],
)
def test_room_that_is_not_free_is_named(room: Any, changes: Any, message: str) -> None:
    with pytest.raises(RunError, match=message):
        room([1, 0], ready=False, **changes)


def test_ray_restarts_workers_alone_but_not_process_0(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds: list[tuple[str, Any]] = []

    class Remote(SimpleNamespace):
        def options(self, **given: Any) -> Any:
            return SimpleNamespace(remote=lambda: kinds.append((self.kind, self.restarts)))

    def remote(**given: Any) -> Any:
        restarts = given.get("max_restarts")
        return lambda kind: Remote(kind=kind.__name__, restarts=restarts)

    played = SimpleNamespace(remote=remote, PlacementGroupSchedulingStrategy=dict)
    monkeypatch.setattr(ray_job, "_ray", lambda module="ray": played)
    for apart in (False, True):
        told = json.loads(rendered("ray", "restarts=4", apart=apart).files["ray.json"])
        ray_job._actors(told, 2, None)
    ray_job._servers(told, 2, None)
    alone = ("Restarted", 4)
    assert kinds == [("Process", None)] * 3 + [alone] * 3


@pytest.mark.parametrize(
    ("apart", "ends"), [(False, ["process 0", "process 1"]), (True, ["process 0"])]
)
def test_which_processes_a_generation_waits_for(
    monkeypatch: pytest.MonkeyPatch, apart: bool, ends: list[str]
) -> None:
    """A worker that is restarted when the run has ended would wait for the run."""
    found: list[list[str]] = []
    address = SimpleNamespace(remote=lambda: "n1:70")
    run = SimpleNamespace(remote=lambda *given: str(given))
    actors = [SimpleNamespace(address=address, run=run)] * 2
    played = SimpleNamespace(get=str, kill=str, remove_placement_group=str)
    given = {"_ray": lambda module="ray": played, "_room": lambda *given: None}
    given |= {"_actors": lambda *given: actors, "_servers": lambda *given: actors[:1]}
    given["_first_lost"] = lambda *both: found.extend([*one.values()] for one in both)
    for name, one in given.items():
        monkeypatch.setattr(ray_job, name, one)
    ray_job._generation(json.loads(rendered("ray", apart=apart).files["ray.json"]))
    both = ["process 0", "process 1", "server 0"]
    assert found == [ends, [one for one in both if one not in ends]]


def test_a_generation_ends_with_the_processes_that_train(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server may still run then; a failure of one ends the generation before."""

    class LostError(Exception):
        pass

    def get(one: Any) -> int:
        if one == "lost":
            raise LostError
        return int(one[-1])

    ray = SimpleNamespace(
        exceptions=SimpleNamespace(RayError=LostError), get=get, wait=lambda all: (all[:1], all[1:])
    )
    monkeypatch.setattr(ray_job, "_ray", lambda: ray)
    assert ray_job._first_lost({"a0": "process 0"}, {"lost": "server 0"}) is None
    assert ray_job._first_lost({"a1": "process 0"}, {}) == ("process 0", 1)
    two = {"a0": "process 0", "b0": "process 1"}
    order = lambda all: (sorted(all, key=lambda one: one == "b0")[:1], ())  # noqa: E731
    ray.wait = order
    assert ray_job._first_lost(two, {"lost": "server 0"}) == ("server 0", None)
    assert ray_job._first_lost(two, {"c2": "server 0"}) == ("server 0", 2)
