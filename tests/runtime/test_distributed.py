import re
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import jax
import pytest

from jaxdist.errors import RunError
from jaxdist.runtime import clusters
from jaxdist.runtime.clusters import sightings
from jaxdist.runtime.connection import _bind_address, _lost_peer
from jaxdist.runtime.processes import Processes, find_processes

ENVIRON = {
    "JAX_COORDINATOR_ADDRESS": "10.0.0.1:99",
    "JAX_NUM_PROCESSES": "4",
    "JAX_PROCESS_ID": "3",
}


def test_flags_win_over_the_environment():
    assert find_processes(ENVIRON) == Processes("10.0.0.1:99", 4, 3)
    assert find_processes(ENVIRON, index=1) == Processes("10.0.0.1:99", 4, 1)


def test_alone_or_with_nobody_to_ask():
    assert find_processes({}) is None
    with pytest.raises(RunError, match=r"no scheduler has set its variables\. Use --coordinator"):
        find_processes({}, detect=True)


def test_some_of_three_is_an_error_that_names_the_rest():
    with pytest.raises(RunError, match="JAX_NUM_PROCESSES, JAX_PROCESS_ID"):
        find_processes({}, coordinator="h:1")


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({**ENVIRON, "JAX_PROCESS_ID": "4"}, "process id 4 of 4"),
        ({**ENVIRON, "JAX_NUM_PROCESSES": "x"}, "process id 3 of x"),
        ({**ENVIRON, "JAX_COORDINATOR_ADDRESS": "host"}, "'host' is not HOST:PORT"),
    ],
)
def test_contradictions(environ, message):
    with pytest.raises(RunError, match=message):
        find_processes(environ)


def test_a_loopback_coordinator_listens_on_loopback_only():
    assert _bind_address("127.0.0.1:5") == "127.0.0.1:5"
    assert _bind_address("localhost:5") == "127.0.0.1:5"
    assert _bind_address("10.0.0.1:5") is None


def while_devices_start(error: Exception) -> RuntimeError:
    """The error of `jax.devices()` when `error` happens within."""
    try:
        try:
            raise error
        except Exception as inner:
            raise RuntimeError(f"Unable to initialize backend 'cpu': {inner}")  # noqa: B904
    except RuntimeError as outer:
        return outer


def test_a_peer_lost_in_a_collective_or_while_devices_start_is_reported_as_lost():
    me = Processes("h:1", 2, 1)
    rpc = jax.errors.JaxRuntimeError(
        "UNAVAILABLE: Socket closed\nAdditional GRPC error information from remote target "
        "coordination_service while calling /xla.coordination.CoordinationService/GetKeyValue:"
    )
    gloo = jax.errors.JaxRuntimeError("UNKNOWN: Gloo all-reduce failed: closed by peer\n at 5")
    lost = "process 1 of 2 cannot continue: process 0 (h:1) is lost or unreachable. "
    for error in (rpc, while_devices_start(rpc)):
        assert str(_lost_peer(error, me)).startswith(lost)
    assert " continue: UNKNOWN: Gloo all-reduce failed: closed by peer. All" in str(
        _lost_peer(gloo, me)
    )
    for error in (ValueError("x"), RuntimeError("x"), while_devices_start(OSError("no driver"))):
        assert _lost_peer(error, me) is None


ENVIRONMENTS = Path(__file__).parent / "environments"


MADE = {
    "slurm_22_het": ("slurm_22", {"SLURM_HET_SIZE": "2"}),
    "torchrun_without_address": (
        None,
        {"TORCHELASTIC_RUN_ID": "7", "RANK": "0", "WORLD_SIZE": "2"},
    ),
}
"""Neighbours of what was captured."""


def captured(name: str) -> dict[str, str]:
    """What a process saw that a scheduler had started; values may have several lines."""
    if name in MADE:
        base, changes = MADE[name]
        return {**({} if base is None else captured(base)), **changes}
    text = (ENVIRONMENTS / f"{name}.env").read_text()
    return dict(re.findall(r"^(\w+)=((?:.*)(?:\n(?!\w+=).*)*)", text.rstrip(), re.MULTILINE))


SLURM = captured("slurm_22")


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("slurm_22", Processes("n1:61441", 2, 1)),
        ("slurm_22_second_step", Processes("n1:61442", 1, 0)),
        ("open_mpi_4", Processes("192.0.2.7:62736", 2, 1)),
        ("open_mpi_5", Processes("head:63221", 2, 1)),
        ("gke_tpu_two_slices", Processes("train-slice-0-0.train:8476", 8, 7)),
        ("skypilot", Processes("10.0.0.4:8476", 2, 1)),
    ],
)
def test_schedulers_are_found_by_what_they_really_set(name, found):
    assert find_processes(captured(name), detect=True) == found


@pytest.mark.parametrize("tasks", ["1(x2)", "2(x3),1", "4,3,2(x2)"])
def test_the_number_of_processes_is_the_steps_own_whatever_tasks_per_node_says(tasks):
    environ = {**SLURM, "SLURM_STEP_TASKS_PER_NODE": tasks, "SLURM_TASKS_PER_NODE": tasks}
    environ |= {"SLURM_STEP_NUM_TASKS": "7", "SLURM_NTASKS": "9", "SLURM_PROCID": "6"}
    assert find_processes(environ, detect=True) == Processes("n1:61441", 7, 6)


def test_steps_of_one_job_have_ports_of_their_own():
    ports = set()
    for step in range(40):
        found = find_processes({**SLURM, "SLURM_STEP_ID": str(step)}, detect=True)
        ports.add(found.coordinator)
    assert len(ports) == 40


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("slurm_22_batch", "Slurm: SLURM_STEP_NODELIST not set: this shell belongs to job 2, but"),
        ("slurm_22_het", r"Slurm: the job has 2 components \(SLURM_HET_SIZE\), and srun sets"),
        ("torchrun_without_address", "torchrun: MASTER_ADDR not set"),
        ("intel_mpi", r"MPI \(PMI\): its variables do not contain the address of process 0"),
    ],
)
def test_what_a_scheduler_does_not_say_is_asked_for(name, reason):
    with pytest.raises(RunError, match=reason):
        find_processes(captured(name), detect=True)


def test_the_address_may_be_given_and_the_rest_found():
    given = {**captured("intel_mpi"), "JAX_COORDINATOR_ADDRESS": "head:5"}
    assert find_processes(given, detect=True) == Processes("head:5", 2, 1)
    pod = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "2"}
    assert find_processes(pod, coordinator="a:5", count=4, detect=True) == Processes("a:5", 4, 2)


@pytest.mark.parametrize(
    ("environ", "found"),
    [
        ({**SLURM, "JAX_COORDINATOR_PORT": "99"}, "n1:99"),
        ({**SLURM, "SLURM_HET_SIZE": "1"}, "n1:61441"),
        ({**SLURM, "SLURM_STEP_NODELIST": "n[001-003,7]-ib"}, "n001-ib:61441"),
        ({**SLURM, "SLURM_STEP_NODELIST": "rack[1-2]n[3-4]"}, "rack1n3:61441"),
        ({**SLURM, "SLURM_STEP_NODELIST": "n[07-9]-ib,x"}, "n07-ib:61441"),
        ({**SLURM, **captured("open_mpi_4")}, "192.0.2.7:62736"),
        (
            {
                **captured("open_mpi_4"),
                "OMPI_MCA_orte_hnp_uri": "4096.0;tcp6://[fe80::1,fe80::2]:43370",
            },
            "[fe80::1]:61441",
        ),
    ],
)
def test_neighbours_of_what_was_seen(environ, found):
    assert find_processes(environ, detect=True).coordinator == found


def test_every_scheduler_that_left_a_trace_is_named_with_what_it_said():
    both = sightings({**captured("slurm_22_batch"), **captured("open_mpi_5")})
    assert [one.scheduler for one in both] == ["Open MPI", "Slurm"]
    assert both[0].whole
    assert not both[1].whole
    assert both[0].read["OMPI_COMM_WORLD_RANK"] == "1"


class Metadata(BaseHTTPRequestHandler):
    """As the server that hosts of TPU VMs ask."""

    def do_GET(self):
        answers = {
            "agent-worker-number": "1",
            "worker-network-endpoints": "unknown:unknown:10.1.0.2,unknown:unknown:10.1.0.3",
            "tpu-env": "ZONE: 'here'\nMEGASCALE_NUM_SLICES: '1'\n",
        }
        self.send_response(200 if self.headers["Metadata-Flavor"] == "Google" else 403)
        self.end_headers()
        self.wfile.write(answers[self.path.rsplit("/", 1)[1]].encode())

    def log_message(self, *args):
        pass


def test_a_tpu_vm_asks_its_host(monkeypatch, tmp_path):
    device = tmp_path / "accel0"
    device.touch()
    monkeypatch.setattr(clusters, "TPU_FILES", (str(device),))
    with HTTPServer(("127.0.0.1", 0), Metadata) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        environ = {"GCE_METADATA_IP": f"127.0.0.1:{server.server_port}"}
        assert find_processes(environ, detect=True) == Processes("10.1.0.2:8476", 2, 1)
        server.shutdown()
    with pytest.raises(RunError, match=r"TPU VM: 127\.0\.0\.1:1 does not answer"):
        find_processes({"GCE_METADATA_IP": "127.0.0.1:1"}, detect=True)


def test_nobody_is_detected_where_nobody_was_asked_for():
    assert find_processes(SLURM) is None
