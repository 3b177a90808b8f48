import pytest

from jaxdist.errors import RunError
from jaxdist.runtime.connection import _bind_address
from jaxdist.runtime.processes import Processes, find_processes

ENVIRON = {
    "JAX_COORDINATOR_ADDRESS": "10.0.0.1:99",
    "JAX_NUM_PROCESSES": "4",
    "JAX_PROCESS_ID": "3",
}


def test_flags_win_over_the_environment():
    assert find_processes(ENVIRON) == Processes("10.0.0.1:99", 4, 3)
    assert find_processes(ENVIRON, index=1) == Processes("10.0.0.1:99", 4, 1)


def test_alone_or_detected():
    assert find_processes({}) is None
    assert find_processes({}, detect=True) == Processes()


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


SLURM = {
    "SLURM_JOB_ID": "4099",
    "SLURM_STEP_NODELIST": "node[007-015],other",
    "SLURM_NTASKS": "9",
    "SLURM_PROCID": "8",
    "SLURM_LOCALID": "0",
}
OPEN_MPI = {
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "1",
}


@pytest.mark.parametrize(
    ("environ", "found"),
    [
        (SLURM, Processes("node007:61443", 9, 8)),
        ({**SLURM, "JAX_COORDINATOR_PORT": "99"}, Processes("node007:99", 9, 8)),
        (OPEN_MPI, Processes("10.96.0.1:62624", 4, 1)),
        ({**SLURM, **OPEN_MPI}, Processes("10.96.0.1:62624", 4, 1)),
        (
            {**OPEN_MPI, "OMPI_MCA_orte_hnp_uri": "4096.0;tcp6://[fe80::1,fe80::2]:43370"},
            Processes("[fe80::1]:61441", 4, 1),
        ),
        ({**OPEN_MPI, "OMPI_MCA_orte_hnp_uri": "?"}, Processes()),
    ],
)
def test_a_cluster_is_found_as_jax_finds_it(environ, found):
    assert find_processes(environ, detect=True) == found


def test_nobody_is_detected_where_nobody_was_asked_for():
    assert find_processes(SLURM) is None
