"""The engine of a JobSet on GKE, for TPU slices, for nodes with GPUs, and for nodes with only CPUs.

Each job of the set is a slice. A set that loses a pod is restarted, up to `restarts` times, and its
processes resume from the newest checkpoint. A restart after a disruption by Kubernetes (an
eviction, the loss of a spot node, a drain) is not counted. Servers on separate machines are a
further job of the set. Kubernetes restarts each pod of this job alone, and likewise each pod with
workers of `strategy.type: parameter_server`. The rendered API is jobset.x-k8s.io/v1alpha2, which
JobSet 0.6 and newer versions support.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator
from ruamel.yaml import YAML

from jaxdist.config.schema import Config, Count
from jaxdist.errors import STOPPED, ConfigError
from jaxdist.launch.contract import Engine, Environment, HostGroup, Job, Rendered
from jaxdist.runtime.clusters import FIXED_PORT
from jaxdist.runtime.topology import Topology, parse_topology
from jaxdist.types import Json, JsonObject

MANIFEST = "jobset.yaml"
WORKERS = "slice"
SERVERS = "serve"
CONTAINER = "train"


def _if_disrupted(action: str) -> JsonObject:
    condition: JsonObject = {"type": "DisruptionTarget", "status": "True"}
    return {"action": action, "onPodConditions": [condition]}


_NOT_COUNTED: list[Json] = [
    _if_disrupted("FailJob"),
    # When one pod must stop, all processes save and exit with this code. Without this rule, the
    # exits of the other pods would count as failures.
    {
        "action": "FailJob",
        "onExitCodes": {"containerName": CONTAINER, "operator": "In", "values": [STOPPED]},
    },
]
"""The failures of a pod that make its job fail with the reason PodFailurePolicy. The restart after
such a failure is not counted.
"""
_RESTART: JsonObject = {
    "name": "disruption",
    "action": "RestartJobSetAndIgnoreMaxRestarts",
    "onJobFailureReasons": ["PodFailurePolicy"],
}
MOST_NAME = 40
"""The largest length of a set's name. A pod's name may have 63 characters: the set's name, the
job's name, two numbers, and five more letters.
"""
ACCELERATORS = {
    "v4": "tpu-v4-podslice",
    "v5e": "tpu-v5-lite-podslice",
    "v5p": "tpu-v5p-slice",
    "v6e": "tpu-v6e-slice",
    "tpu7x": "tpu7x",
}
"""The accelerator by which GKE selects the nodes of each TPU family."""


def chips_per_host(topology: Topology) -> int:
    """Return the number of chips on each machine of a GKE slice.

    A slice of up to eight chips of v5e or v6e is a single machine. Each machine of any other slice
    has four chips, or all chips of a slice with fewer than four.

    >>> [chips_per_host(parse_topology(text)) for text in ("v5e:2x4", "v5e:4x4", "v5p:4x4x4")]
    [8, 4, 4]
    """
    chips = math.prod(topology.shape)
    most = 8 if topology.family in ("v5e", "v6e") and chips <= 8 else 4
    return min(chips, most)


class Volume(Config):
    """A disk that all pods share."""

    claim: str
    """The name of the disk's PersistentVolumeClaim."""
    path: str = "/data"
    """The path at which the volume is mounted; the run directory should be below this path."""


class ServerPods(Config):
    """The pods of servers, each of which runs a single server on a node with CPUs."""

    cpu: Count | str | None = None
    """The number of cores of each pod; null sets no limit."""
    memory: str | None = None
    """The memory of each pod, such as 64Gi; null sets no limit."""
    node_selector: dict[str, str] = Field(default_factory=dict)
    """The labels that the nodes of servers must have, such as the label of a pool of nodes."""

    @property
    def limits(self) -> JsonObject:
        """The limits of the resources of each pod."""
        cpu: JsonObject = {} if self.cpu is None else {"cpu": str(self.cpu)}
        return cpu if self.memory is None else {**cpu, "memory": self.memory}


class Gke(Engine):
    """The engine of GKE: kubectl applies a JobSet, which needs JobSet's controller to run."""

    program: ClassVar[str] = "kubectl"
    install: ClassVar[str] = "install kubectl, and JobSet in the cluster (jobset.sigs.k8s.io)"
    identity: ClassVar[str] = r"jobset\.jobset\.x-k8s\.io/(\S+)"
    type: Literal["gke"] = "gke"
    """The name that selects this engine."""
    image: str
    """The container image with jaxdist, and with the config at the path of the launch."""
    tpu: str | None = None
    """The topology of a TPU slice, such as v5p:4x4x4, which determines the nodes and chips; null
    uses no TPU."""
    slices: Count = 1
    """The number of TPU slices, which are connected by a slower network."""
    gpus_per_node: Count | None = None
    """The number of GPUs of each pod; null uses no GPU."""
    namespace: str = "default"
    """The Kubernetes namespace of the JobSet."""
    queue: str | None = None
    """The queue of Kueue, which starts either all pods or none; null uses no queue."""
    restarts: Annotated[int, Field(ge=0)] = 20
    """The number of restarts of the JobSet after failures of pods that train, and of the pods of
    servers between two restarts of the JobSet; evictions are not counted."""
    grace_seconds: Count = 300
    """The time between SIGTERM and SIGKILL, in seconds, within which the processes save."""
    volume: Volume | None = None
    """The volume for checkpoints; null mounts no volume."""
    cpu: Count | str | None = None
    """The number of cores of each pod, for pods without TPUs and GPUs."""
    node_selector: dict[str, str] = Field(default_factory=dict)
    """The labels that nodes must have, besides the labels that follow from `tpu`."""
    servers: ServerPods = ServerPods()
    """The pods of servers, for `jaxdist launch --servers`."""
    service_account: str | None = None
    """The Kubernetes service account of the pods, which can have permissions of the cloud."""
    environment: Environment = Field(default_factory=dict)
    """The environment variables of the processes, such as `environment.NCCL_DEBUG=INFO`."""

    @model_validator(mode="after")
    def _one_kind(self) -> Gke:
        if self.tpu is not None and self.gpus_per_node is not None:
            raise ValueError(
                "tpu and gpus_per_node are both set, but a pod has either TPUs or GPUs; leave one "
                "of the two settings out"
            )
        if self.tpu is not None:
            family = parse_topology(self.tpu).family
            if family not in ACCELERATORS:
                known = ", ".join(ACCELERATORS)
                raise ValueError(f"tpu {self.tpu} is unknown to GKE: choose from {known}")
        return self

    def check(self, job: Job) -> None:
        if not re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", job.name) or len(job.name) > MOST_NAME:
            raise ConfigError(
                f"--name {job.name}: a name in Kubernetes has lowercase letters, digits and '-', "
                f"begins with a letter, does not end with '-', and here has at most {MOST_NAME} "
                "characters"
            )
        if job.processes > 1:
            raise ConfigError(
                "--processes-per-node: a pod runs a single process, which uses all devices of the "
                "pod; leave the option out"
            )
        if self.tpu is not None and job.nodes > 1:
            raise ConfigError(
                f"--nodes {job.nodes}: tpu {self.tpu} determines the number of hosts; leave "
                "--nodes out"
            )
        if self.slices > 1 and self.tpu is None:
            raise ConfigError(
                f"slices {self.slices} needs the setting tpu: set tpu to the type of the slices"
            )
        if self.slices > 1 and job.apart:
            # Each slice is a job that succeeds with its own pod 0, but only one pod is process 0.
            raise ConfigError(
                f"slices {self.slices}: on GKE, the workers of parameter servers run on the hosts "
                "of one slice; leave slices out, or set strategy.type: hybrid"
            )
        if job.servers:
            self._check_servers(job)

    def _check_servers(self, job: Job) -> None:
        if job.server_nodes != job.servers:
            raise ConfigError(
                f"--servers {job.server_nodes}: a pod runs a single server; use --servers "
                f"{job.servers}, the value of strategy.servers"
            )
        if self.volume is None:
            raise ConfigError(
                f"--servers {job.server_nodes}: the servers find the run by its directory, which "
                "all pods must see: set volume"
            )
        if job.run and not Path(job.run).is_relative_to(self.volume.path):
            raise ConfigError(
                f"--servers {job.server_nodes}: the pods of servers do not see run.directory "
                f"{job.run}: set a folder below {self.volume.path}, the path of the volume"
            )

    def render(self, job: Job, folder: Path) -> Rendered:
        text = io.StringIO()
        yaml = YAML()
        yaml.default_flow_style = False
        yaml.dump(self._jobset(job), text)
        command = ("kubectl", "apply", "--namespace", self.namespace, "-f")
        return Rendered({MANIFEST: text.getvalue()}, (*command, str(folder / MANIFEST)))

    def commands(self, identity: str, folder: Path) -> Mapping[str, Sequence[str]]:
        where = ("--namespace", self.namespace)
        mine = ("-l", f"jobset.sigs.k8s.io/jobset-name={identity}")
        logs = ("--tail=50", "--prefix", "--all-containers")
        return {
            "status": ("kubectl", "get", "jobset,pods", *where, *mine),
            "logs": ("kubectl", "logs", *where, *mine, *logs),
            "stop": ("kubectl", "delete", "jobset", identity, *where),
        }

    def _hosts(self, job: Job) -> int:
        if self.tpu is None:
            return job.nodes
        topology = parse_topology(self.tpu)
        return math.prod(topology.shape) // chips_per_host(topology)

    def _jobset(self, job: Job) -> JsonObject:
        labels: JsonObject = {} if self.queue is None else {"kueue.x-k8s.io/queue-name": self.queue}
        if job.servers or (job.apart and self.slices * self._hosts(job) > 1):
            # A pod's own host name has no address in other pods, so servers get the pod's DNS name.
            own = f"strategy.processes.host={self._host(job, WORKERS, '0')}"
            job = replace(job, overrides=(*job.overrides, own))
        train, *serve = job.groups("--distributed")
        jobs = [self._workers(job, train), *(self._servers(job, one) for one in serve)]
        # The set is complete as soon as the processes that train have succeeded, even if a server
        # fails at the end of the run.
        done: JsonObject = {"operator": "All", "targetReplicatedJobs": [WORKERS]}
        return {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": {"name": job.name, **({"labels": labels} if labels else {})},
            "spec": {
                "failurePolicy": {"maxRestarts": self.restarts, "rules": [_RESTART]},
                **({"successPolicy": done} if serve else {}),
                "network": {"enableDNSHostnames": True},
                "replicatedJobs": list[Json](jobs),
            },
        }

    def _workers(self, job: Job, group: HostGroup) -> JsonObject:
        hosts = self._hosts(job)
        pod = self._pod(group, self._environment(job, hosts), self._limits(), self._selector())
        # A failed pod is not restarted alone: the JobSet restarts all pods.
        policy: JsonObject = {"backoffLimit": 0, "podFailurePolicy": {"rules": _NOT_COUNTED}}
        if job.apart:
            # The job succeeds with process 0, which ends the run. Otherwise a pod that was
            # restarted late would wait for this run.
            done: JsonObject = {"rules": [{"succeededIndexes": "0"}]}
            policy = {**_alone("backoffLimitPerIndex", self.restarts), "successPolicy": done}
        return _replicated(WORKERS, self.slices, hosts, pod, policy)

    def _servers(self, job: Job, group: HostGroup) -> JsonObject:
        host = self._host(job, SERVERS, "$(JOB_COMPLETION_INDEX)")
        named = replace(group, command=(*group.command, "--host", host))
        # The pods of servers have no TPUs and GPUs, so jax in the image must not look for any.
        environ = {"JAX_PLATFORMS": "cpu", **self.environment}
        pod = self._pod(named, environ, self.servers.limits, {**self.servers.node_selector})
        # A server restarts alone: either the other servers hold all rows, or the processes that
        # train end.
        return _replicated(SERVERS, 1, group.count, pod, _alone("backoffLimit", self.restarts))

    def _host(self, job: Job, name: str, index: str) -> str:
        """Return the DNS name of a pod in the first job (number 0) of a replicated job.

        The result is longer than necessary, since gRPC accepts a wildcard in a certificate only
        before a name with a dot.

        Args:
          job: the launched job, whose name is the name of the JobSet.
          name: the name of the replicated job.
          index: the number of the pod in the job, as text or as a shell variable.
        """
        return f"{job.name}-{name}-0-{index}.{job.name}.{self.namespace}.svc"

    def _pod(
        self, group: HostGroup, environ: dict[str, str], limits: JsonObject, selector: JsonObject
    ) -> JsonObject:
        # By default, /dev/shm of a container has 64 MiB, which is too little for NCCL and for
        # snapshots in memory.
        volumes: list[Json] = [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
        mounts: list[Json] = [{"name": "shm", "mountPath": "/dev/shm"}]
        if self.volume is not None:
            claim: JsonObject = {"claimName": self.volume.claim}
            volumes.append({"name": "data", "persistentVolumeClaim": claim})
            mounts.append({"name": "data", "mountPath": self.volume.path})
        container: JsonObject = {
            "name": CONTAINER,
            "image": self.image,
            "command": list[Json](group.command),
            "env": [{"name": name, "value": value} for name, value in environ.items()],
            **({"resources": {"limits": limits}} if limits else {}),
            "volumeMounts": mounts,
        }
        pod: JsonObject = {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": self.grace_seconds,
            "containers": [container],
        }
        if selector:
            pod["nodeSelector"] = selector
        if self.service_account is not None:
            pod["serviceAccountName"] = self.service_account
        pod["volumes"] = volumes
        return pod

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
        """Return the variables with which pods find one another; for TPUs, GKE sets them."""
        if self.tpu is not None:
            return dict(self.environment)
        # JobSet's headless service has the name of the set, and the host name of each pod is below
        # it.
        first = f"{job.name}-{WORKERS}-0-0.{job.name}"
        return {
            "JAX_COORDINATOR_ADDRESS": f"{first}:{FIXED_PORT}",
            "JAX_NUM_PROCESSES": str(hosts),
            **self.environment,
        }


def _alone(limit: str, restarts: int) -> JsonObject:
    """Return the settings with which Kubernetes restarts each pod of a job alone.

    Args:
      limit: the name of the setting that limits the restarts.
      restarts: the largest number of restarts, in which evictions do not count.
    """
    rules: list[Json] = [_if_disrupted("Ignore")]
    return {limit: restarts, "podFailurePolicy": {"rules": rules}}


def _replicated(
    name: str, replicas: int, pods: int, pod: JsonObject, policy: JsonObject
) -> JsonObject:
    """Return a replicated job of the JobSet.

    Args:
      name: the name of the replicated job.
      replicas: the number of its jobs.
      pods: the number of pods of each job.
      pod: the specification of a pod.
      policy: the other settings of a job, for restarts of its pods and for its success.
    """
    template: JsonObject = {
        "parallelism": pods,
        "completions": pods,
        "completionMode": "Indexed",
        **policy,
        "template": {"spec": pod},
    }
    return {"name": name, "replicas": replicas, "template": {"spec": template}}
