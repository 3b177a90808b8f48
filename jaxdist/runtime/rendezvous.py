"""The processes of a program meet before jax joins them, each in words that a person can use.

jax waits for its peers without a word, and ends the process from C++ when its patience is at an
end. So they meet here first, on the same address: process 0 listens, the others come, one line
each way, and when all are there process 0 closes the port for jax to open it. The lines carry what
each process says of itself, and what process 0 decides for it from what all have said. A caller
that is not a process of this program is sent away.
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
"""Who waits for less says nothing."""
WORD_SECONDS = 30.0
_RETRY_SECONDS = 0.2
_HELLO_SECONDS = 2.0
_LINE_BYTES = 8000
"""Longer lines are cut: 100 GPUs with their names fit."""
_NAMED = 20
_REMEDY = (
    "check that HOST:PORT names the host of process 0, that all hosts know the name and no "
    "firewall is between them, or wait longer with --join-timeout SECONDS"
)
_HELLO = re.compile(rb"jaxdist process (\d{1,7}) of (\d{1,7})(?: (.*))?\n")
Decide = Callable[[Sequence[Json]], Sequence[Json]]
"""From what each process has said, in their order, what each is told."""


def free_port(host: str = "127.0.0.1") -> int:
    """One of this machine that nobody had a moment ago.

    Args:
      host: empty for all its addresses.
    """
    with socket.socket() as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]


@dataclass
class Wait:
    """A wait with an end, and a word now and then while it lasts.

    Args:
      seconds: how long it may last.
      say: called with a line.
      clock: seconds that never go back; for tests.
    """

    seconds: float
    say: Callable[[str], None]
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._begun = self.clock()
        self._next_word = FIRST_WORD_SECONDS

    @property
    def over(self) -> bool:
        """Whether it has lasted long enough."""
        return self.elapsed >= self.seconds

    @property
    def elapsed(self) -> float:
        """Seconds since it began."""
        return self.clock() - self._begun

    def tell(self, line: str) -> None:
        """Say what is waited for, if it is time for a word."""
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
    """Return when all `count` processes are there, and jax can join them.

    Args:
      coordinator: HOST:PORT of process 0, as the others see it.
      bind: HOST:PORT on which process 0 listens.
      seconds: how long to wait.
      say: called with a line now and then while some are missing.
      told: what this process says of itself, as JSON of at most 7,000 characters.
      decide: called in process 0; where it raises a RunError, all processes raise it.

    Returns:
      what `decide` has decided for this process.

    Raises:
      RunError: the address does not resolve or cannot be listened on, some are missing after
        `seconds` and are named, or `decide` refuses.
    """
    wait = Wait(seconds, say)
    if index == 0:
        _resolve(coordinator, count, wait)
        return _gather(coordinator, count, bind, wait, told, decide)
    return _join(coordinator, count, index, wait, told)


def split_address(address: str) -> tuple[str, int]:
    """Host and port.

    >>> split_address("[::1]:80"), split_address("node1:80")
    (('::1', 80), ('node1', 80))
    """
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def _resolve(coordinator: str, count: int, wait: Wait) -> None:
    """Process 0 reaches itself by the same name, in jax; a name may take a while to be known."""
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
        if host in ("", "::") and socket.has_dualstack_ipv6():
            return socket.create_server(
                ("::", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024
            )
        family = socket.AF_INET6 if ":" in host.removeprefix("::") else socket.AF_INET
        address = "" if host == "::" else host
        return socket.create_server((address, port), family=family, backlog=1024)
    except OSError as error:
        raise RunError(
            f"process 0 cannot listen on {bind}: {_reason(error)}; name a free port of this "
            "process's own host with --coordinator HOST:PORT"
        ) from error


def _admit(
    peer: socket.socket, came: dict[int, socket.socket], words: dict[int, Json], count: int
) -> None:
    """Keep a newcomer that is one of the program's processes; tell it where it is not."""
    peer.settimeout(_HELLO_SECONDS)  # a stranger that says nothing
    hello = _HELLO.fullmatch(_line(peer))
    if hello is None:
        peer.close()
        return
    index, its_count = int(hello[1]), int(hello[2])
    if its_count != count:
        problem = f"process {index} was started as one of {its_count}, process 0 as one of {count}"
    elif not 0 < index < count or index in came:
        problem = f"there is a process {index} already: give each its own --process-id"
    else:
        peer.setblocking(False)
        came[index], words[index] = peer, _json(hello[3])
        return
    _send(peer, f"refused {problem}")
    peer.close()


def _json(text: bytes | None) -> Json:
    with suppress(ValueError, RecursionError):
        return json.loads(text or b"null")
    return None


def _join(coordinator: str, count: int, index: int, wait: Wait, told: Json) -> Json:
    address, who = split_address(coordinator), f"process {index} of {count}"
    while True:
        try:
            with socket.create_connection(address, timeout=_RETRY_SECONDS * 10) as peer:
                _send(peer, f"jaxdist {who} {json.dumps(told)}")
                peer.settimeout(wait.seconds + _RETRY_SECONDS * 10)
                answer = _line(peer).decode(errors="replace").strip()
        except OSError as error:
            answer, reason = "", _reason(error)
        else:
            reason = "process 0 went away again"
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
    """Until jax has taken the port: it would try again only after a second."""
    while not wait.over:
        with suppress(OSError), socket.create_connection(address, timeout=_RETRY_SECONDS * 10):
            return
        time.sleep(_RETRY_SECONDS / 10)


def _missing(coordinator: str, count: int, came: Iterable[int], seconds: float) -> str:
    missing = sorted(set(range(1, count)) - set(came))
    named = ", ".join(map(str, missing[:_NAMED])) + (", ..." if len(missing) > _NAMED else "")
    return (
        f"{count - len(missing)} of {count} processes came to {coordinator} within {seconds:g} s; "
        f"missing: {named}. See what they say, {_REMEDY}"
    )


def _line(peer: socket.socket) -> bytes:
    """What comes up to the end of a line; too long, too slow or cut short, what there is of it."""
    found = b""
    with suppress(OSError):
        while not found.endswith(b"\n") and len(found) < _LINE_BYTES:
            piece = peer.recv(1)
            if not piece:
                break
            found += piece
    return found


def _send(peer: socket.socket, line: str) -> None:
    with suppress(OSError):  # it is gone: the other side is asked again, or nobody is there
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
