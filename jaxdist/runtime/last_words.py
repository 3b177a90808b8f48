"""A filter of standard error, whose last line explains to the user why the process ended.

When a peer is lost, jax and gloo end this process from C++, with log lines and a stack, and no
Python code runs afterwards. Another small process therefore holds the real standard error and
passes on everything except the log of the coordination between processes. If that log reported that
the process must end, and the process gave no reason itself, the filter adds a last line.

The other process runs this file as its program, so the file imports only the standard library.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress

CLOSE_SECONDS = 5.0

_LOG = re.compile(r"([IWEF])\d{4} [\d:.]+ +\d+ ([\w./-]+):\d+\] ")
_COORDINATION = re.compile(
    r"((grpc_)?coordination_\w+|preemption_\w+|grpc_state|grpc_util|client|service)\.(cc|h)"
)
_TERMINATE = "terminate called after throwing an instance of "
_REST = re.compile(
    r"\s*$|Additional GRPC error information|:(UNKNOWN|\{)|\*\*\* Check failure|    @ +0x"
    r"|PC: @|\*\*\* SIG|  what\(\):|https://www\.tensorflow\.org/"
)
_STATUS = re.compile(r"absl::Status: (.+)|what\(\):\s*(.+)")
_UNREACHABLE = re.compile(
    r"Failed to send RPC to coordination service"
    r"|UNAVAILABLE(?s:.)*remote target coordination_service"
)
_MOST_CHARACTERS = 300
REMEDY = (
    "All processes end when one process is lost: read the messages of all processes, then start "
    "all of them again with --resume"
)


def translate(lines: Iterable[str], who: str, coordinator: str) -> Iterator[str]:
    """Yield the lines to pass on, each as soon as possible.

    If jax's log says that the process must end, and the process gave no reason itself, a last line
    has the reason.

    >>> log = "F1122 17:46:40.161690    8488 client.h:80] Terminating process because the ... "
    >>> lost = "absl::Status: UNAVAILABLE: Failed to send RPC to coordination service. Either\\n"
    >>> *_, last = translate(["text\\n", log + lost, "    @  0x7f  xla()\\n"], "process 1", "a:1")
    >>> last.split(".")[0]
    'error: process 1 cannot continue: process 0 (a:1) is lost or unreachable'

    Args:
      lines: the lines of standard error, with their line ends.
      who: the name of this process in the last line.
      coordinator: HOST:PORT of process 0.
    """
    inside, fatal, said, passed = False, None, False, "\n"
    for line in lines:
        log = _LOG.match(line)
        if log is not None:
            inside = _COORDINATION.fullmatch(log[2].rpartition("/")[2]) is not None
        elif line.startswith(_TERMINATE):
            inside, fatal = True, fatal or line.removeprefix(_TERMINATE).strip()
        elif not _REST.match(line):
            inside = False
        if not inside:
            said = said or line.startswith(("error: ", "interrupted"))
            passed = line
            yield line
        elif log is not None and log[1] == "F":
            fatal = line[log.end() :]
        status = _STATUS.search(line) if inside else None
        if status is not None and fatal is not None:
            fatal = status[1] or status[2]
    if fatal is not None and not said:
        if not passed.endswith("\n"):
            yield "\n"
        yield f"error: {who} cannot continue: {meaning(fatal, coordinator)}. {REMEDY}\n"


def meaning(status: str, coordinator: str) -> str:
    """Return a sentence without its period for an error status of jax.

    >>> rpc = "UNAVAILABLE: Socket closed\\n... from remote target coordination_service while ..."
    >>> meaning(rpc, "a:1")
    'process 0 (a:1) is lost or unreachable'
    >>> meaning("UNKNOWN: Gloo all-reduce failed: Connection closed.\\n at pair.cc", "a:1")
    'UNKNOWN: Gloo all-reduce failed: Connection closed'
    """
    if _UNREACHABLE.search(status):
        return f"process 0 ({coordinator}) is lost or unreachable"
    return status.strip().partition("\n")[0].rstrip(".")[:_MOST_CHARACTERS]


class StandardError:
    """The standard error of this process, which `translate` filters until `close`."""

    def __init__(self, who: str, coordinator: str) -> None:
        sys.stderr.flush()
        reader, writer = os.pipe()
        # The filter has a separate session, so that it outlives a Ctrl-C or a hangup that ends this
        # process.
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, who, coordinator],
            stdin=reader,
            start_new_session=True,
        )
        os.close(reader)
        os.dup2(writer, 2)
        os.close(writer)

    def close(self) -> None:
        """Wait until all output has been passed on, at the end of a process; drop later output."""
        # Standard error may be closed already, or nothing may read it any more.
        with suppress(OSError, ValueError):
            sys.stderr.flush()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 2)
        os.close(nowhere)
        with suppress(subprocess.TimeoutExpired):  # A child process may still hold the pipe open.
            self._process.wait(CLOSE_SECONDS)


def _main() -> None:
    # Standard input stays open as long as this process runs, so there is no `with`.
    lines = open(0, encoding="utf-8", errors="surrogateescape", newline="\n")  # noqa: SIM115
    for line in translate(lines, sys.argv[1], sys.argv[2]):
        # If this filter ended because nothing reads its output, the writing process would get
        # SIGPIPE.
        with suppress(OSError):
            os.write(2, line.encode("utf-8", "surrogateescape"))


if __name__ == "__main__":
    _main()
