"""The conversion of the protocol's messages and replies to envelopes and back."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxdist.param_server.protocol.messages import (
    Acknowledge,
    Answer,
    Message,
    Publish,
    Pull,
    Push,
    Refuse,
    Reply,
    Stamp,
)
from jaxdist.wire.contract import Envelope, Op
from jaxdist.wire.frames import text_payload


def of_message(message: Message, tensor: int, payload: np.ndarray | None = None) -> Envelope:
    """Convert a worker's message to an envelope.

    Args:
      tensor: the number of the shard, which the envelope carries as its tensor.
      payload: the payload of a push, or of a pull of rows. Other messages have None.
    """
    given: dict[str, Any] = {**vars(message.stamp), "tensor": tensor, "payload": payload}
    if isinstance(message, Pull):
        return Envelope(Op.PULL, **given)
    of_push = {"clock": message.clock, "version": message.version, "tokens": message.tokens}
    return Envelope(Op.PUSH, **given, **of_push, flag=message.usable)


def to_message(envelope: Envelope) -> Message:
    """Convert an envelope to a worker's message; the inverse of `of_message`."""
    stamp = Stamp(envelope.epoch, envelope.client, envelope.sequence)
    if envelope.op is Op.PULL:
        return Pull(stamp)
    assert envelope.op is Op.PUSH, envelope.op
    return Push(stamp, envelope.clock, envelope.version, envelope.tokens, envelope.flag)


def of_reply(reply: Reply, tensor: int, epoch: int, payload: np.ndarray | None = None) -> Envelope:
    """Convert a server's reply to an envelope.

    Args:
      epoch: the epoch of the range.
      payload: the parameters, or None for a reply without parameters.
    """
    given: dict[str, Any] = {"epoch": epoch, **vars(reply), "tensor": tensor}
    match reply:
        case Acknowledge(version=version):
            # The flag distinguishes a dropped push from a push that is part of version 0.
            given |= {"version": version or 0, "flag": version is not None}
            return Envelope(Op.ACKNOWLEDGE, **given)
        case Answer():
            return Envelope(Op.ANSWER, **given, payload=payload)
        case Publish():
            return Envelope(Op.PUBLISH, **given, payload=payload)
        case Refuse():
            reason = given.pop("reason")
            return Envelope(Op.REFUSE, **given, payload=text_payload(reason))


def to_reply(envelope: Envelope) -> Reply:
    """Convert an envelope to a server's reply; the inverse of `of_reply`."""
    one = envelope
    match one.op:
        case Op.ACKNOWLEDGE:
            return Acknowledge(one.client, one.sequence, one.version if one.flag else None)
        case Op.ANSWER:
            return Answer(one.client, one.sequence, one.clock, one.version, one.floor)
        case Op.PUBLISH:
            return Publish(one.client, one.version, one.floor)
        case Op.REFUSE:
            return Refuse(one.client, one.sequence, one.text, one.epoch)
        case _:
            raise AssertionError(f"{one.op.name} is no reply")
