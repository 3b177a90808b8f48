"""The payloads of table messages, as bytes: row numbers and float32 values.

A pull has n rows, and the answer to a pull has n D values. A push has a learning rate, n rows and n
D gradients. Together, a pull, its answer and a push take n (8 + 8 D) + 4 bytes, or n (24 + 8 D) + 4
bytes with keys.
"""

from __future__ import annotations

import numpy as np

from jaxdist.wire.contract import Envelope, Op, Spec
from jaxdist.wire.frames import spec_for

NUMBER = np.dtype(np.uint32)
RATE_BYTES = 4
"""The bytes of the learning rate at the start of a push."""


def step_bytes(unique: int, width: int, kind: np.dtype = NUMBER) -> int:
    """Return the bytes of all payloads in a step that touches `unique` rows of a server.

    Args:
      unique: the number of unique rows.
      width: the number of values in a row.
      kind: the dtype of row numbers.
    """
    return unique * (2 * kind.itemsize + 8 * width) + RATE_BYTES


def payload_spec(server: int, most_rows: int, width: int, kind: np.dtype = NUMBER) -> Spec:
    """Return the specification of payloads of at most `most_rows` rows.

    Args:
      server: the number of the server, which is the tensor number of the payloads.
      most_rows: the largest number of rows.
      width: the number of values in a row.
      kind: the dtype of row numbers.
    """
    size = RATE_BYTES + most_rows * (kind.itemsize + 4 * width)
    return Spec(server, np.dtype(np.uint8), size, most=True)


def spec_of_reply(envelope: Envelope, spec: Spec) -> Spec | None:
    """Return the specification of the payload of a server's message, or None without a payload.

    Args:
      envelope: the envelope of the message.
      spec: the specification of payloads with rows.
    """
    return spec_for(envelope, spec, spec)


def spec_of_message(envelope: Envelope, spec: Spec) -> Spec | None:
    """Return the specification of the payload of a worker's message, or None without a payload.

    Unlike the pulls of other parameter servers, pulls of tables have payloads.

    Args:
      envelope: the envelope of the message.
      spec: the specification of payloads with rows.
    """
    return spec if envelope.op is Op.PULL else spec_for(envelope, spec, spec)


def pack(*arrays: np.ndarray) -> np.ndarray:
    """Return the bytes of all given arrays, one after another."""
    return np.concatenate([np.ascontiguousarray(x).reshape(-1).view(np.uint8) for x in arrays])


def unpack_push(
    payload: np.ndarray, width: int, kind: np.dtype = NUMBER
) -> tuple[float, np.ndarray, np.ndarray] | None:
    """Return the rate, rows and gradients of a push, or None if its length is not valid.

    Args:
      payload: the bytes of the push.
      width: the number of values in a row.
      kind: the dtype of row numbers.
    """
    count, rest = divmod(payload.size - RATE_BYTES, kind.itemsize + 4 * width)
    if rest or count < 0:
        return None
    middle = RATE_BYTES + kind.itemsize * count
    rate = float(payload[:RATE_BYTES].view(np.float32)[0])
    grads = payload[middle:].view(np.float32).reshape(count, width)
    return rate, payload[RATE_BYTES:middle].view(kind), grads
