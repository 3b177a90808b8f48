"""The position of a process among its peers, from the variables of the process's scheduler.

jax can detect the position itself, but does so silently, and gives no reason if the detection
fails. This module reports each scheduler whose variables are set, with the variables that were
read, and the reason if the variables do not suffice.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

FIRST_PORT, PORTS = 61440, 4096
"""The first port, and the number of ports, of the range in which a job gets its port."""
FIXED_PORT = 8476
"""The port for schedulers that give each job separate addresses; jax also uses this port, for TPU
pods."""
TPU_FILES = ("/dev/accel0", "/dev/vfio/0")
"""The device files of TPUs, of which a host with TPUs has at least one."""
TPU_ATTRIBUTES = ("agent-worker-number", "worker-network-endpoints", "tpu-env")
METADATA_SECONDS = 5.0
_OPEN_MPI = (
    "OMPI_MCA_orte_hnp_uri",
    "PMIX_NAMESPACE",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_RANK",
)


@dataclass(frozen=True)
class Sighting:
    """A scheduler's information about this process, in which a missing value is None.

    Attributes:
      scheduler: the name of the scheduler.
      coordinator: HOST:PORT of process 0.
      count: the number of processes.
      index: the number of this process.
      read: the environment variables that were read, with their values.
      missing: a description of the missing information, or an empty string if nothing is missing.
    """

    scheduler: str
    coordinator: str | None = None
    count: int | None = None
    index: int | None = None
    read: Mapping[str, str] = field(default_factory=dict)
    missing: str = ""

    @property
    def whole(self) -> bool:
        """Whether the information suffices to join the other processes."""
        return None not in (self.coordinator, self.count, self.index)


Environ = Mapping[str, str]
Detector = Callable[[Environ], Sighting | None]


def sightings(environ: Environ) -> list[Sighting]:
    """Return the information from all schedulers whose variables are set, the most specific first.

    >>> found = sightings({"PMI_RANK": "1", "PMI_SIZE": "2"})
    >>> found[0].scheduler, found[0].index, found[0].missing
    ('MPI (PMI)', 1, 'its variables do not contain the address of process 0')
    """
    return [found for look in DETECTORS if (found := look(environ)) is not None]


def _read(environ: Environ, *names: str) -> dict[str, str]:
    return {name: environ[name] for name in names if name in environ}


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdigit() else None


def _port(environ: Environ, default: int) -> int:
    return _number(environ.get("JAX_COORDINATOR_PORT")) or default


def _lacking(read: Environ, *names: str) -> str:
    lacking = [name for name in names if name not in read]
    return f"{', '.join(lacking)} not set" if lacking else ""


def open_mpi(environ: Environ) -> Sighting | None:
    """Return the information from Open MPI's mpirun, or None if mpirun did not start this process.

    mpirun reports the host on which it runs: version 4 as an address, version 5 in the name of the
    job. Process 0 is on this host unless the user excluded the host from the job.
    """
    uri, job, size, rank = _OPEN_MPI
    read = _read(environ, *_OPEN_MPI)
    if size not in read or rank not in read:
        return None
    count, index = _number(read[size]), _number(read[rank])
    host = re.match(r"(\d+).*?(?:tcp://([^,:;]+)|tcp6://(\[[^],]+))", read.get(uri, ""))
    if host is not None:
        name, number = host[2] or f"{host[3]}]", int(host[1]) // PORTS
    else:
        host = re.match(r"prterun-(.+)-(\d+)@", read.get(job, ""))
        if host is None:
            missing = f"neither {uri} nor {job} contains the host of mpirun"
            return Sighting("Open MPI", None, count, index, read, missing)
        name, number = host[1], int(host[2])
    port = _port(environ, number % PORTS + FIRST_PORT)
    return Sighting("Open MPI", f"{name}:{port}", count, index, read)


def slurm(environ: Environ) -> Sighting | None:
    """Return the information from Slurm's srun, or None outside of a Slurm job.

    The port differs between concurrent steps of a job.
    """
    needed = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_PROCID")
    # SLURM_NTASKS comes second, because it may be the number of the whole job.
    sizes = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    read = _read(environ, *needed, *sizes, "SLURM_STEP_ID")
    if "SLURM_JOB_ID" not in read:
        return None
    count = next((_number(read[name]) for name in sizes if name in read), None)
    lacking = _lacking(read, *needed)
    if lacking or count is None:
        missing = f"{lacking or 'SLURM_NTASKS not set'}: this shell belongs to job "
        missing += f"{read['SLURM_JOB_ID']}, but srun has not started this process"
        return Sighting("Slurm", read=read, missing=missing)
    if (components := _number(environ.get("SLURM_HET_SIZE")) or 1) > 1:
        missing = f"the job has {components} components (SLURM_HET_SIZE), and srun sets its "
        missing += "variables for a single component"
        return Sighting("Slurm", read=_read(environ, *read, "SLURM_HET_SIZE"), missing=missing)
    host = first_node(read["SLURM_STEP_NODELIST"])
    job, step = int(read["SLURM_JOB_ID"]), _number(read.get("SLURM_STEP_ID")) or 0
    port = _port(environ, (job + step * 97) % PORTS + FIRST_PORT)
    return Sighting("Slurm", f"{host}:{port}", count, _number(read["SLURM_PROCID"]), read)


def torchrun(environ: Environ) -> Sighting | None:
    """Return the information from torchrun, or None if torchrun did not start this process.

    torchrun is the same as `python -m torch.distributed.run`.
    """
    run, host, rank, size = "TORCHELASTIC_RUN_ID", "MASTER_ADDR", "RANK", "WORLD_SIZE"
    read = _read(environ, run, host, "MASTER_PORT", rank, size)
    if run not in read:
        return None
    if missing := _lacking(read, host, rank, size):
        return Sighting("torchrun", read=read, missing=missing)
    # The port differs from MASTER_PORT, on which torchrun's own store listens.
    port = _port(environ, (_number(read.get("MASTER_PORT")) or 0) % PORTS + FIRST_PORT)
    count, index = _number(read[size]), _number(read[rank])
    return Sighting("torchrun", f"{read[host]}:{port}", count, index, read)


def first_node(nodes: str) -> str:
    """Return the first node in Slurm's list of nodes.

    >>> [first_node(nodes) for nodes in ("a1,b2", "node[007-015,020],b", "n[1-2]-ib,c")]
    ['a1', 'node007', 'n1-ib']
    >>> first_node("rack[1-2]n[3-4]")
    'rack1n3'
    """
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    assert first is not None
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first[0])


def tpu_pod(environ: Environ) -> Sighting | None:
    """Return the information about a TPU host on GKE, or None on any other host.

    The job may have one slice or several slices.
    """
    hosts = (
        "TPU_PROCESS_ADDRESSES" if "TPU_PROCESS_ADDRESSES" in environ else "TPU_WORKER_HOSTNAMES"
    )
    slices, slice_id, at = "MEGASCALE_NUM_SLICES", "MEGASCALE_SLICE_ID", "TPU_WORKER_ID"
    lead = "MEGASCALE_COORDINATOR_ADDRESS"
    read = _read(environ, hosts, at, slices, slice_id, lead)
    if hosts not in read or at not in read:
        return None
    names = [name.partition(":")[0] for name in read[hosts].split(",")]
    many, which = _number(read.get(slices)) or 1, _number(read.get(slice_id)) or 0
    within = _number(read[at])
    index = None if within is None else which * len(names) + within
    if many > 1 and lead not in read:
        return Sighting("TPU pod", None, many * len(names), index, read, f"{lead} not set")
    host = read[lead].partition(":")[0] if many > 1 else names[0]
    address = f"{host}:{_port(environ, FIXED_PORT)}"
    return Sighting("TPU pod", address, many * len(names), index, read)


def skypilot(environ: Environ) -> Sighting | None:
    """Return the information from SkyPilot, or None if SkyPilot did not start this process.

    SkyPilot starts a single process on each node.
    """
    ips, rank = "SKYPILOT_NODE_IPS", "SKYPILOT_NODE_RANK"
    read = _read(environ, ips, rank)
    if not read:
        return None
    if missing := _lacking(read, ips, rank):
        return Sighting("SkyPilot", read=read, missing=missing)
    nodes = read[ips].split()
    address = f"{nodes[0]}:{_port(environ, FIXED_PORT)}"
    return Sighting("SkyPilot", address, len(nodes), _number(read[rank]), read)


def tpu_vm(environ: Environ) -> Sighting | None:
    """Return the information from a TPU VM's metadata server, or None on any other host.

    The result is also None on GKE, where variables have the information.
    """
    # On GKE the variables are set, so the metadata server is not needed.
    if tpu_pod(environ) is not None or "TPU_SKIP_MDS_QUERY" in environ:
        return None
    if not any(Path(one).exists() for one in TPU_FILES):
        return None
    server = environ.get("GCE_METADATA_IP", "metadata.google.internal")
    try:
        at, ends, given = (_attribute(server, name) for name in TPU_ATTRIBUTES)
    except OSError as error:
        return Sighting("TPU VM", missing=f"{server} does not answer: {error}")
    # `tpu-env` has lines of the form KEY: 'value'; an endpoint is a name, or name:id:address.
    pairs = dict(re.findall(r"^(\w+): *'?([^'\n]*)'?$", given, re.MULTILINE))
    hosts = ",".join(end.split(":")[-1] for end in ends.split(","))
    found = tpu_pod({**pairs, "TPU_WORKER_HOSTNAMES": hosts, "TPU_WORKER_ID": at.strip()})
    return None if found is None else replace(found, scheduler="TPU VM")


def _attribute(server: str, name: str) -> str:
    import urllib.request  # The import of urllib is slow, and few processes need it.

    url = f"http://{server}/computeMetadata/v1/instance/attributes/{name}"
    asked = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
    with urllib.request.urlopen(asked, timeout=METADATA_SECONDS) as answer:
        return answer.read().decode()


def kubernetes(environ: Environ) -> Sighting | None:
    """Return the information from a Kubernetes pod, or None outside of a pod.

    A pod of an indexed job knows its number, but not its peers.
    """
    if "KUBERNETES_SERVICE_HOST" not in environ:
        return None
    read = _read(environ, "JOB_COMPLETION_INDEX")
    missing = "a pod knows neither the number of processes nor the address of process 0"
    return Sighting(
        "Kubernetes", index=_number(read.get("JOB_COMPLETION_INDEX")), read=read, missing=missing
    )


def _ranks(scheduler: str, rank: str, size: str) -> Detector:
    """Return a detector for a scheduler that gives a rank and a size, but no address."""

    def look(environ: Environ) -> Sighting | None:
        read = _read(environ, rank, size)
        if len(read) < 2:
            return None
        missing = "its variables do not contain the address of process 0"
        return Sighting(
            scheduler,
            count=_number(read[size]),
            index=_number(read[rank]),
            read=read,
            missing=missing,
        )

    return look


DETECTORS: tuple[Detector, ...] = (
    torchrun,  # This detector is first, since mpirun, srun or a pod may start torchrun.
    open_mpi,  # This detector precedes `slurm`, since the script of a Slurm job may use mpirun.
    _ranks("MPI (PMI)", "PMI_RANK", "PMI_SIZE"),
    _ranks("PALS", "PALS_RANKID", "PALS_NRANKS"),
    _ranks("Flux", "FLUX_TASK_RANK", "FLUX_JOB_SIZE"),
    slurm,
    tpu_pod,
    skypilot,
    kubernetes,
    tpu_vm,
)
