"""A log on disk of the order in which a server or an aggregator processed messages.

With such logs a replay is exact.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

from jaxdist.config.files import parse_json, read_regular
from jaxdist.errors import RunError, os_errors_as
from jaxdist.param_server.consistency.contract import Consistency
from jaxdist.param_server.protocol import rack, server
from jaxdist.param_server.protocol.messages import (
    Acknowledge,
    Answer,
    Message,
    Publish,
    Pull,
    Push,
    Reply,
    Stamp,
)
from jaxdist.param_server.protocol.rack import RackState, RackStep
from jaxdist.param_server.protocol.server import RangeState


class ProtocolCall(NamedTuple):
    """A call of the protocol with its arguments.

    A server calls `jaxdist.param_server.protocol.server`, and an aggregator calls
    `jaxdist.param_server.protocol.rack`.

    Attributes:
      now: the time of the server or the aggregator, in seconds.
      client: the client of a join or a leave.
      message: the received message, or None for any other call.
      reply: the server's reply that an aggregator receives, or None for any other call.
    """

    kind: Literal["join", "leave", "tick", "receive", "hear"]
    now: float
    client: int = 0
    message: Message | None = None
    reply: Reply | None = None


def step(model: Consistency, state: RangeState, taken: ProtocolCall) -> server.Step:
    """Repeat a recorded call of a server's protocol, and return the resulting step.

    Args:
      taken: the recorded call.
    """
    match taken.kind:
        case "join":
            return server.join(model, state, taken.client, taken.now)
        case "leave":
            return server.leave(model, state, taken.client, taken.now)
        case "tick":
            return server.tick(model, state, taken.now)
        case "receive":
            assert taken.message is not None
            return server.receive(model, state, taken.message, taken.now)
        case "hear":
            raise AssertionError("a server receives no replies")


def rack_step(model: Consistency, state: RackState, taken: ProtocolCall) -> RackStep:
    """Repeat a recorded call of an aggregator's protocol, and return the resulting step.

    Args:
      taken: the recorded call.
    """
    match taken.kind:
        case "join":
            return rack.join_rack(model, state, taken.client)
        case "leave":
            return rack.leave_rack(model, state, taken.client)
        case "receive":
            assert taken.message is not None
            return rack.from_worker(model, state, taken.message, taken.now)
        case "hear":
            assert taken.reply is not None
            return rack.from_root(model, state, taken.reply)
        case "tick":
            raise AssertionError("an aggregator applies no updates")


def is_recorded(state: RangeState, found: server.Step) -> bool:
    """Return whether a replay needs the call that led from `state` to this step.

    A repeated reply, a refusal, and a tick at which nothing is due change nothing. A log that
    recorded such calls would grow for as long as a client waits.
    """
    if found.state is state:
        # The call repeated a reply or did nothing, which a replay does not need.
        return False
    return bool(found.effects) or found.state != state


def server_log(number: int, clock: int) -> str:
    """Return the name of the file in which a server logs its messages.

    Args:
      number: the number of the server.
      clock: the clock at which the log begins.
    """
    return f"server_{number}.from_{clock}.jsonl"


def rack_log(number: int, server: int, clock: int) -> str:
    """Return the name of the file in which an aggregator logs its messages for a server.

    Args:
      number: the number of the rack.
      server: the number of the server to which the messages go.
      clock: the clock at which the log begins.
    """
    return f"rack_{number}.server_{server}.from_{clock}.jsonl"


class OrderLog:
    """A log of protocol calls, one JSON line each, without the arrays of changes.

    Raises:
      RunError: the file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        with os_errors_as(
            RunError,
            f"order log {path} cannot be written",
            "make room on the disk, or allow this user to write there",
        ):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("w", encoding="utf-8")

    def add(self, taken: ProtocolCall) -> None:
        """Append a call of the protocol to the log."""
        self._file.write(json.dumps(_fields(taken)) + "\n")

    def flush(self) -> None:
        """Flush written lines to the operating system."""
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_order(path: Path) -> Iterator[ProtocolCall]:
    """Yield the calls of a log, in order; a truncated last line is skipped.

    Raises:
      RunError: the file cannot be read, or a line is not a call.
    """
    with os_errors_as(RunError, f"order log {path} cannot be read", "restore the file from a copy"):
        lines = read_regular(path).decode("utf-8", "replace").split("\n")
    # The text after the last line break is empty, or is a line that a crash cut off.
    for number, line in enumerate(lines[:-1], 1):
        try:
            yield _taken(parse_json(line))
        except (ValueError, TypeError) as error:
            raise RunError(
                f"order log {path}, line {number}: {line[:60]!r} is not an entry; restore the file "
                "from a copy"
            ) from error


_REPLIES = {"acknowledge": Acknowledge, "answer": Answer, "publish": Publish}


def _fields(taken: ProtocolCall) -> list[object]:
    match taken.reply or taken.message:
        case None:
            return [taken.kind, taken.now, taken.client]
        case Pull(stamp) | Push(stamp) as message:
            _, *own = vars(message).values()
            kind = type(message).__name__.lower()
            return [kind, taken.now, stamp.client, stamp.sequence, stamp.epoch, *own]
        case reply:
            return [type(reply).__name__.lower(), taken.now, *vars(reply).values()]


def _taken(fields: list[Any]) -> ProtocolCall:
    kind, now, *rest = fields
    if not all(isinstance(one, int | float | None) for one in (now, *rest)):
        raise ValueError(f"{fields} has texts or lists in the place of numbers")
    match kind, rest:
        case "join" | "leave" | "tick", [client]:
            return ProtocolCall(kind, now, client)
        case "acknowledge" | "answer" | "publish", _:
            return ProtocolCall("hear", now, reply=_REPLIES[kind](*rest))
        case "pull", [client, sequence, epoch]:
            return ProtocolCall("receive", now, message=Pull(Stamp(epoch, client, sequence)))
        case "push", [client, sequence, epoch, clock, version, tokens, usable]:
            push = Push(Stamp(epoch, client, sequence), clock, version, tokens, usable)
            return ProtocolCall("receive", now, message=push)
        case _:
            raise ValueError(f"{fields} is not an entry of the log of messages")
