"""A rendezvous, with readable messages, of a program's processes before jax connects them.

jax waits for its peers silently, and ends the process from C++ after a timeout. The processes
therefore connect here first, on the same address. Process 0 listens, and each of the other
processes connects and sends a line with its data. When all processes have connected, process 0
answers each process with a decision. Process 0 then closes the port, so that jax can open it. A
client that is not a process of this program is rejected.
"""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass

from jaxdist.errors import RunError
from jaxdist.types import Json

JOIN_SECONDS = 300
FIRST_WORD_SECONDS = 5.0
"""The seconds before the first message to the user; a shorter wait prints nothing."""
WORD_SECONDS = 30.0
_RETRY_SECONDS = 0.2
_HELLO_SECONDS = 2.0
_LINE_BYTES = 8000
"""The length in bytes at which a line is cut; the data of a process with 100 GPUs are shorter."""
_NAMED = 20
_REMEDY = (
    "check that HOST:PORT names the host of process 0, which all hosts can resolve and no "
    "firewall blocks, or wait longer with --join-timeout SECONDS"
)
_HELLO = re.compile(rb"jaxdist process (\d{1,7}) of (\d{1,7})(?: (.*))?\n")
Decide = Callable[[Sequence[Json]], Sequence[Json]]
"""A function from the data of all processes, in order, to the decision for each process."""


def free_port(host: str = "127.0.0.1") -> int:
    """Return a port of this machine that was free at the time of the call.

    Args:
      host: the address of this machine, or an empty string for all addresses of the machine.
    """
    with socket.socket() as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]


@dataclass
class Wait:
    """A wait with a time limit, which prints a message now and then.

    Args:
      seconds: the time limit, in seconds.
      say: a function that prints a line for the user.
      clock: a monotonic clock in seconds, which tests replace.
    """

    seconds: float
    say: Callable[[str], None]
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._begun = self.clock()
        self._next_word = FIRST_WORD_SECONDS

    @property
    def over(self) -> bool:
        """Whether the time limit of the wait is reached."""
        return self.elapsed >= self.seconds

    @property
    def elapsed(self) -> float:
        """The seconds since the start of the wait."""
        return self.clock() - self._begun

    def tell(self, line: str) -> None:
        """Print a line about the wait, if a message is due."""
        if self.elapsed >= self._next_word:
            self._next_word = self.elapsed + WORD_SECONDS
            self.say(line)


def meet(
    coordinator: str,
    count: int,
    index: int,
    *,
    bind: str,
    seconds: float,
    say: Callable[[str], None],
    told: Json = None,
    decide: Decide = list,
) -> Json:
    """Wait until all `count` processes have connected to process 0, so that jax can connect them.

    Args:
      coordinator: HOST:PORT at which the other processes reach process 0.
      count: the number of processes.
      index: the number of this process.
      bind: HOST:PORT on which process 0 listens.
      seconds: the time to wait, in seconds.
      say: a function that receives a line from time to time while processes are missing.
      told: the data of this process, as JSON of at most 7,000 characters.
      decide: a function that computes the decisions in process 0; if it raises a RunError, all
        processes raise this error.

    Returns:
      The decision of `decide` for this process.

    Raises:
      RunError: the address does not resolve, process 0 cannot listen on the address, some processes
        are missing after `seconds` (the message names them), or `decide` raises the error.
    """
    wait = Wait(seconds, say)
    if index == 0:
        _resolve(coordinator, count, wait)
        return _gather(coordinator, count, bind, wait, told, decide)
    return _join(coordinator, count, index, wait, told)


def split_address(address: str) -> tuple[str, int]:
    """Split an address into host and port.

    >>> split_address("[::1]:80"), split_address("node1:80")
    (('::1', 80), ('node1', 80))
    """
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def _resolve(coordinator: str, count: int, wait: Wait) -> None:
    """Wait until the host name of process 0 resolves.

    The name may resolve only some time after process 0 has started.
    """
    while True:
        try:
            socket.getaddrinfo(*split_address(coordinator), type=socket.SOCK_STREAM)
            return
        except OSError as error:
            reason = _reason(error)
        if wait.over:
            raise RunError(
                f"the address of process 0, {coordinator}, is not known: {reason} (tried for "
                f"{wait.seconds:g} s); {_REMEDY}"
            )
        wait.tell(f"waiting for {coordinator} (0 of {count} processes): {reason}")
        time.sleep(_RETRY_SECONDS)


def _gather(
    coordinator: str, count: int, bind: str, wait: Wait, told: Json, decide: Decide
) -> Json:
    came: dict[int, socket.socket] = {}
    words: dict[int, Json] = {0: told}
    with ExitStack() as stack:
        stack.callback(lambda: [peer.close() for peer in came.values()])
        server = stack.enter_context(_listen(bind))
        server.settimeout(_RETRY_SECONDS)
        while len(came) < count - 1:
            if wait.over:
                raise _refuse(came, _missing(coordinator, count, came, wait.seconds))
            wait.tell(f"waiting for {coordinator} ({len(came) + 1} of {count} processes)")
            newcomer = None
            with suppress(TimeoutError):
                newcomer, _ = server.accept()
            # A process that was restarted during the wait connects again with the same number. The
            # connection from before the restart must not block the new connection.
            for index in [index for index, peer in came.items() if _is_gone(peer)]:
                came.pop(index).close()
            if newcomer is not None:
                _admit(newcomer, came, words, count)
        try:
            decided = decide([words[index] for index in range(count)])
        except RunError as error:
            raise _refuse(came, str(error)) from error
        for index, peer in came.items():
            _send(peer, f"go {json.dumps(decided[index])}")
        return decided[0]


def _refuse(came: dict[int, socket.socket], text: str) -> RunError:
    for peer in came.values():
        _send(peer, f"refused {text}")
    return RunError(text)


def _listen(bind: str) -> socket.socket:
    host, port = split_address(bind)
    try:
        # The socket accepts IPv4 and IPv6, since other processes may resolve the name to an address
        # of either kind.
        if host in ("", "::") and socket.has_dualstack_ipv6():
            return socket.create_server(
                ("::", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024
            )
        family = socket.AF_INET6 if ":" in host.removeprefix("::") else socket.AF_INET
        address = "" if host == "::" else host
        return socket.create_server((address, port), family=family, backlog=1024)
    except OSError as error:
        raise RunError(
            f"process 0 cannot listen on {bind}: {_reason(error)}; choose a free port of the host "
            "on which process 0 runs, with --coordinator HOST:PORT"
        ) from error


def _admit(
    peer: socket.socket, came: dict[int, socket.socket], words: dict[int, Json], count: int
) -> None:
    """Keep a connection that is from a process of the program; reject any other connection.

    Args:
      peer: the new connection.
      came: the kept connections, by number of the process. The function adds `peer`.
      words: the data of the processes, by number of the process. The function adds the data that
        arrive through `peer`.
      count: the number of processes of the program.
    """
    peer.settimeout(_HELLO_SECONDS)  # A stranger may connect and send nothing.
    hello = _HELLO.fullmatch(_line(peer))
    if hello is None:
        peer.close()
        return
    index, its_count = int(hello[1]), int(hello[2])
    if its_count != count:
        problem = (
            f"process {index} was started with a count of {its_count} processes, but process 0 "
            f"with a count of {count}: give all processes the same --num-processes"
        )
    elif not 0 < index < count or index in came:
        problem = (
            f"another process with the number {index} has already joined: use a different "
            "--process-id for each process"
        )
    else:
        # From now on only `_is_gone` reads from the connection, and must not block.
        peer.setblocking(False)
        came[index], words[index] = peer, _json(hello[3])
        return
    _send(peer, f"refused {problem}")
    peer.close()


def _json(text: bytes | None) -> Json:
    # Another program may have sent the line, even JSON that is nested too deeply to be parsed.
    with suppress(ValueError, RecursionError):
        return json.loads(text or b"null")
    return None


def _join(coordinator: str, count: int, index: int, wait: Wait, told: Json) -> Json:
    address, who = split_address(coordinator), f"process {index} of {count}"
    while True:
        try:
            with socket.create_connection(address, timeout=_RETRY_SECONDS * 10) as peer:
                _send(peer, f"jaxdist {who} {json.dumps(told)}")
                # Process 0 names the missing processes when its time limit is reached. The limit
                # here must be longer, or this process could give up before process 0 answers.
                peer.settimeout(wait.seconds + _RETRY_SECONDS * 10)
                answer = _line(peer).decode(errors="replace").strip()
        except OSError as error:
            answer, reason = "", _reason(error)
        else:
            reason = "process 0 closed the connection before it answered"
        if answer.startswith("go "):
            _until_open(address, wait)
            return json.loads(answer.removeprefix("go "))
        if answer.startswith("refused "):
            raise RunError(answer.removeprefix("refused "))
        if wait.over:
            raise RunError(
                f"{who} cannot reach process 0 at {coordinator}: {reason} (tried for "
                f"{wait.seconds:g} s); {_REMEDY}"
            )
        wait.tell(f"waiting for {coordinator} ({who}): {reason}")
        time.sleep(_RETRY_SECONDS)


def _until_open(address: tuple[str, int], wait: Wait) -> None:
    """Wait until jax listens on the port, or until the time limit.

    Without this wait, jax would retry a failed connection only after a second.
    """
    while not wait.over:
        with suppress(OSError), socket.create_connection(address, timeout=_RETRY_SECONDS * 10):
            return
        time.sleep(_RETRY_SECONDS / 10)


def _missing(coordinator: str, count: int, came: Iterable[int], seconds: float) -> str:
    missing = sorted(set(range(1, count)) - set(came))
    named = ", ".join(map(str, missing[:_NAMED])) + (", ..." if len(missing) > _NAMED else "")
    return (
        f"{count - len(missing)} of {count} processes joined {coordinator} within {seconds:g} s; "
        f"missing: {named}. Read the messages of the missing processes, {_REMEDY}"
    )


def _line(peer: socket.socket) -> bytes:
    """Read a line; if the line is too long, too slow or cut short, return only a part or nothing.

    Nothing after the line is read.
    """
    with suppress(OSError), peer.makefile("rb", buffering=0) as stream:
        return stream.readline(_LINE_BYTES)
    return b""


def _send(peer: socket.socket, line: str) -> None:
    with suppress(OSError):  # The peer is gone. If it restarts, it opens a new connection.
        peer.sendall(line.encode()[: _LINE_BYTES - 1] + b"\n")


def _is_gone(peer: socket.socket) -> bool:
    try:
        return not peer.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True


def _reason(error: OSError) -> str:
    return "no answer" if isinstance(error, TimeoutError) else (error.strerror or str(error))
