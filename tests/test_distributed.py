import pytest

from jaxdist.distributed import Processes, _bind_address, find_processes
from jaxdist.errors import RunError

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
