"""A JobSet for GKE: slices of TPUs, or nodes with GPUs (or neither).

Each job of the set is a slice. A set that loses a pod is restarted, up to `restarts` times, and its
processes resume from the newest checkpoint. Kubernetes' own disruptions (an eviction, a spot node
that is taken away, a drain) are not counted. The rendered API is jobset.x-k8s.io/v1alpha2, of
JobSet 0.6 or newer.
"""

from __future__ import annotations

import io
import math
import re
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator
from ruamel.yaml import YAML

from jaxdist.config.schema import Config, Count
from jaxdist.errors import STOPPED, ConfigError
from jaxdist.launch.contract import Commands, Engine, Environment, Job, Rendered
from jaxdist.runtime.clusters import FIXED_PORT
from jaxdist.runtime.topology import Topology, parse_topology
from jaxdist.types import Json, JsonObject

MANIFEST = "jobset.yaml"
WORKERS = "slice"
CONTAINER = "train"
_NOT_COUNTED: list[Json] = [
    {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
    # When a pod must stop, all processes save and exit with this code, including those of
    # other pods, whose failure would otherwise be counted.
    {
        "action": "FailJob",
        "onExitCodes": {"containerName": CONTAINER, "operator": "In", "values": [STOPPED]},
    },
]
"""Failures of a pod that fail its job with the reason PodFailurePolicy."""
_RESTART: JsonObject = {
    "name": "disruption",
    "action": "RestartJobSetAndIgnoreMaxRestarts",
    "onJobFailureReasons": ["PodFailurePolicy"],
}
MOST_NAME = 40
"""Longest name, of the 63 letters of a pod's name: that ends with the set's job, two numbers and
five letters."""
ACCELERATORS = {
    "v4": "tpu-v4-podslice",
    "v5e": "tpu-v5-lite-podslice",
    "v5p": "tpu-v5p-slice",
    "v6e": "tpu-v6e-slice",
    "tpu7x": "tpu7x",
}
"""GKE's names of the nodes of each family."""


def chips_per_host(topology: Topology) -> int:
    """Return the chips per machine of a GKE slice.

    Up to eight chips of v5e and v6e are a single machine; larger slices have four on each.

    >>> [chips_per_host(parse_topology(text)) for text in ("v5e:2x4", "v5e:4x4", "v5p:4x4x4")]
    [8, 4, 4]
    """
    chips = math.prod(topology.shape)
    most = 8 if topology.family in ("v5e", "v6e") and chips <= 8 else 4
    return min(chips, most)


class Volume(Config):
    """A disk that all pods share."""

    claim: str
    """The PersistentVolumeClaim."""
    path: str = "/data"
    """Mount path of the volume; the run directory should be below it."""


class Gke(Engine):
    """The engine of kubectl, with the JobSet controller in the cluster."""

    program: ClassVar[str] = "kubectl"
    install: ClassVar[str] = "install kubectl, and JobSet in the cluster (jobset.sigs.k8s.io)"
    identity: ClassVar[str] = r"jobset\.jobset\.x-k8s\.io/(\S+)"
    type: Literal["gke"] = "gke"
    """Selects this engine."""
    image: str
    """Image with jaxdist, and with the config at the given path."""
    tpu: str | None = None
    """Topology of a slice, such as v5p:4x4x4, which determines nodes and chips; null: no TPU."""
    slices: Count = 1
    """Number of slices of TPUs, joined by a slower network."""
    gpus_per_node: Count | None = None
    """Number of GPUs of each pod, where there is no TPU."""
    namespace: str = "default"
    """Namespace of the set."""
    queue: str | None = None
    """Queue of Kueue, which starts all pods or none."""
    restarts: Annotated[int, Field(ge=0)] = 20
    """Number of restarts of the set after a pod has failed; evictions are not counted."""
    grace_seconds: Count = 300
    """Seconds for saving, between SIGTERM and SIGKILL."""
    volume: Volume | None = None
    """Volume for checkpoints."""
    cpu: Count | str | None = None
    """Number of cores of each pod, where no accelerator determines it."""
    node_selector: dict[str, str] = Field(default_factory=dict)
    """Labels that nodes must have, besides those that `tpu` implies."""
    service_account: str | None = None
    """The Kubernetes service account of the pods, which cloud permissions can refer to."""
    environment: Environment = Field(default_factory=dict)
    """Variables of the processes: `environment.NCCL_DEBUG=INFO`."""

    @model_validator(mode="after")
    def _one_kind(self) -> Gke:
        if self.tpu is not None and self.gpus_per_node is not None:
            raise ValueError("tpu and gpus_per_node: a pod has one or the other")
        if self.tpu is not None:
            family = parse_topology(self.tpu).family
            if family not in ACCELERATORS:
                known = ", ".join(ACCELERATORS)
                raise ValueError(f"tpu {self.tpu}: GKE is known to have {known}")
        return self

    def check(self, job: Job) -> None:
        if not re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", job.name) or len(job.name) > MOST_NAME:
            raise ConfigError(
                f"--name {job.name}: Kubernetes takes small letters, digits and '-', a letter "
                f"first and no '-' last, here at most {MOST_NAME} of them"
            )
        if job.processes > 1:
            raise ConfigError("--processes-per-node: a pod is one process, with all its devices")
        if self.tpu is not None and job.nodes > 1:
            raise ConfigError(f"--nodes {job.nodes}: tpu {self.tpu} says how many hosts there are")
        if self.slices > 1 and self.tpu is None:
            raise ConfigError(f"slices {self.slices} are of TPUs: give tpu")

    def render(self, job: Job) -> Rendered:
        text = io.StringIO()
        yaml = YAML()
        yaml.default_flow_style = False
        yaml.dump(self._jobset(job), text)
        command = ("kubectl", "apply", "--namespace", self.namespace, "-f")
        return Rendered({MANIFEST: text.getvalue()}, (*command, f"{{folder}}/{MANIFEST}"))

    def commands(self, identity: str, folder: Path) -> Commands:
        where = ("--namespace", self.namespace)
        mine = ("-l", f"jobset.sigs.k8s.io/jobset-name={identity}")
        return Commands(
            ("kubectl", "get", "jobset,pods", *where, *mine),
            ("kubectl", "logs", *where, *mine, "--tail=50", "--prefix", "--all-containers"),
            ("kubectl", "delete", "jobset", identity, *where),
        )

    def _hosts(self, job: Job) -> int:
        if self.tpu is None:
            return job.nodes
        topology = parse_topology(self.tpu)
        return math.prod(topology.shape) // chips_per_host(topology)

    def _jobset(self, job: Job) -> JsonObject:
        labels: JsonObject = {} if self.queue is None else {"kueue.x-k8s.io/queue-name": self.queue}
        hosts = self._hosts(job)
        template: JsonObject = {
            "parallelism": hosts,
            "completions": hosts,
            "completionMode": "Indexed",
            "backoffLimit": 0,  # the set is restarted as a whole, not a single pod
            "podFailurePolicy": {"rules": _NOT_COUNTED},
            "template": {"spec": self._pod(job, hosts)},
        }
        return {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": {"name": job.name, **({"labels": labels} if labels else {})},
            "spec": {
                "failurePolicy": {"maxRestarts": self.restarts, "rules": [_RESTART]},
                "network": {"enableDNSHostnames": True},
                "replicatedJobs": [
                    {"name": WORKERS, "replicas": self.slices, "template": {"spec": template}}
                ],
            },
        }

    def _pod(self, job: Job, hosts: int) -> JsonObject:
        limits = self._limits()
        container: JsonObject = {
            "name": CONTAINER,
            "image": self.image,
            "command": list[Json](job.train("--distributed")),
            "env": [{"name": n, "value": v} for n, v in self._environment(job, hosts).items()],
            **({"resources": {"limits": limits}} if limits else {}),
            "volumeMounts": list[Json](
                {"name": name, "mountPath": path} for name, path in self._mounts().items()
            ),
        }
        pod: JsonObject = {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": self.grace_seconds,
            "containers": [container],
        }
        if selector := self._selector():
            pod["nodeSelector"] = selector
        if self.service_account is not None:
            pod["serviceAccountName"] = self.service_account
        # A container's own /dev/shm has 64 MiB, too little for NCCL and for snapshots in memory.
        volumes: list[Json] = [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
        if self.volume is not None:
            claim: JsonObject = {"claimName": self.volume.claim}
            volumes.append({"name": "data", "persistentVolumeClaim": claim})
        pod["volumes"] = volumes
        return pod

    def _mounts(self) -> dict[str, str]:
        return {"shm": "/dev/shm", **({} if self.volume is None else {"data": self.volume.path})}

    def _selector(self) -> JsonObject:
        found: JsonObject = {}
        if self.tpu is not None:
            topology = parse_topology(self.tpu)
            found = {
                "cloud.google.com/gke-tpu-accelerator": ACCELERATORS[topology.family],
                "cloud.google.com/gke-tpu-topology": self.tpu.partition(":")[2],
            }
        return {**found, **self.node_selector}

    def _limits(self) -> JsonObject:
        if self.tpu is not None:
            return {"google.com/tpu": chips_per_host(parse_topology(self.tpu))}
        if self.gpus_per_node is not None:
            return {"nvidia.com/gpu": self.gpus_per_node}
        return {} if self.cpu is None else {"cpu": str(self.cpu)}

    def _environment(self, job: Job, hosts: int) -> dict[str, str]:
        """Return what a pod must know about the others; GKE itself sets this for pods with TPUs."""
        if self.tpu is not None:
            return dict(self.environment)
        first = f"{job.name}-{WORKERS}-0-0.{job.name}"  # the set's service has the set's name
        return {
            "JAX_COORDINATOR_ADDRESS": f"{first}:{FIXED_PORT}",
            "JAX_NUM_PROCESSES": str(hosts),
            **self.environment,
        }
