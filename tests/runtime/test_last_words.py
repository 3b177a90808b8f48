"""What jax and gloo log when a peer is lost, told in one line."""

from __future__ import annotations

import subprocess
import sys

import pytest

from jaxdist.runtime import last_words
from jaxdist.runtime.last_words import translate

LOST = """\
E1122 17:46:40.161635    8488 coordination_service_agent.cc:289] Polled an error from coordination
F1122 17:46:40.161690    8488 client.h:80] Terminating process because the JAX distributed service \
detected fatal errors. This most likely indicates that another task died; absl::Status: \
UNAVAILABLE: Failed to send RPC to coordination service. Either the leader task was preempted
Additional GRPC error information from remote target coordination_service while calling /xla:
:UNKNOWN:Error received from peer  {grpc_message:"Socket closed", grpc_status:14}
*** Check failure stack trace: ***
    @     0x7fda70040634  absl::lts_20260107::log_internal::LogMessage::SendToLog()
    @     0x7fda7904e1f5  (unknown)

"""
DEADLINE = """\
F1122 17:46:40.161690 8488 client.h:80] Terminating process. absl::Status: DEADLINE_EXCEEDED: late
"""
GLOO = """\
terminate called after throwing an instance of 'gloo::EnforceNotMet'
  what():  [enforce fail at gloo/pair.cc:411] nbytes == 4. Received data size doesn't match
"""
OWN = "error: process 1 of 2 cannot continue: Gloo all-reduce failed\n"
FOREIGN = (
    "E1122 17:46:40.161635    8488 cuda_driver.cc:12] out of memory\n    @ 0x1  f()\n\nhello\n"
)


def told(text: str) -> str:
    return "".join(translate(text.splitlines(keepends=True), "process 1 of 2", "node7:99"))


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        (LOST, "process 0 (node7:99) is lost or unreachable. All"),
        (DEADLINE, "DEADLINE_EXCEEDED: late. All"),
        (GLOO, "[enforce fail at gloo/pair.cc:411] nbytes == 4. Received data size doesn't match."),
    ],
)
def test_the_end_in_cpp_is_one_line(log: str, reason: str) -> None:
    for text in (log, "a warning of the user's\n" + log):
        before, _, line = told(text).rpartition("error: process 1 of 2 cannot continue: ")
        assert before == text.removesuffix(log)
        assert line.startswith(reason)
        assert line.endswith("start all of them again with --resume\n")


@pytest.mark.parametrize("text", [OWN + LOST, LOST + OWN])
def test_what_the_process_said_itself_is_not_said_again(text: str) -> None:
    assert told(text) == OWN


@pytest.mark.parametrize("text", [FOREIGN, "Traceback:\n    @ home\nlast line without an end", ""])
def test_all_else_passes(text: str) -> None:
    assert told(text) == text


def test_log_that_ends_nothing_is_left_out() -> None:
    assert told(LOST.splitlines(keepends=True)[0] + FOREIGN) == FOREIGN


def test_the_process_that_holds_standard_error_passes_bytes_on_as_they_are() -> None:
    command = [sys.executable, "-I", "-S", last_words.__file__, "process 1 of 2", "node7:99"]
    text = b"\xff caf\xc3\xa9\r\n" + LOST.encode() + b"end"
    done = subprocess.run(command, input=text, capture_output=True, check=True)
    assert done.stderr.startswith(b"\xff caf\xc3\xa9\r\nend\nerror: process 1 of 2")
    assert done.stdout == b""
