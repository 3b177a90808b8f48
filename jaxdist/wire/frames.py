"""The format of frames: a fixed header, then at most `CHUNK_BYTES` raw bytes of the payload.

Every frame repeats the header of its envelope, so that each frame can be checked separately. All
numbers are little-endian:

    offset  bytes  field
         0      4  magic, b"JXPS"
         4      2  version of this format
         6      1  op
         7      1  dtype: a number of `DTYPES`
         8      1  flag
         9      1  ndim: 1, or 0 without a payload
        10      2  slot: 0, or 1 + the slot of shared memory that holds the whole payload
        12      4  tensor id
        16      8  shape: elements
        24      8  offset of this frame's bytes in the payload
        32      4  length of this frame's bytes
        36      4  epoch
        40      8  client
        48      8  sequence
        56      8  clock
        64      8  version of the parameters
        72      8  floor
        80      8  tokens, a float64
        88      4  crc32c of all bytes before it, and of the bytes after it
        92         the bytes, unless they are in a slot (`jaxdist.wire.shared`)
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

import google_crc32c
import numpy as np
from jax import numpy as jnp

from jaxdist.wire.contract import (
    CARRY_BYTES,
    CARRY_SHARD,
    CARRY_TEXT,
    Envelope,
    Op,
    Peer,
    Spec,
    WireError,
)
from jaxdist.wire.shared import Direction

MAGIC = b"JXPS"
FORMAT = 2
CHUNK_BYTES = 2**20
TEXT_BYTES = 2**15
"""The largest size of a text, which is smaller than any payload in shared memory. The longest text
names the leaders of a run's ranges."""
SECURE_BYTES = 2**24
"""The largest size of a message of secure aggregation, for about 100,000 clients."""
HEAD = struct.Struct("<4sHBBBBHIQQIIQQqqqd")
CRC = struct.Struct("<I")
HEADER_BYTES = HEAD.size + CRC.size
FRAME_BYTES = HEADER_BYTES + CHUNK_BYTES
"""The largest size of a frame, in bytes."""
_SAME = "install the same version of jaxdist on both sides"
_NO_BYTES = np.empty(0, np.uint8)
DTYPES = tuple(np.dtype(name) for name in ("uint8", "float32", jnp.bfloat16, "float16", "float64"))


class FrameError(WireError):
    """The error for a refused frame; the message is the reason.

    Attributes:
      envelope: the envelope without its payload, or None if it could not be parsed.
    """

    def __init__(self, reason: str, envelope: Envelope | None = None) -> None:
        super().__init__(reason)
        self.envelope = envelope


class Header(NamedTuple):
    """The parsed header of a frame.

    Attributes:
      envelope: the envelope without its payload.
      spec: the required shard, dtype and length of the payload, or None without a payload.
      offset: the offset of this frame's bytes in the payload.
      length: the number of this frame's bytes.
      slot: the slot of shared memory that has the bytes, or None if the bytes follow the header.
    """

    envelope: Envelope
    spec: Spec | None
    offset: int
    length: int
    slot: int | None


class StrictService:
    """The base class of a service that ends the session of a peer whose frame it refuses.

    Attributes:
      sender: the name of the peers in errors, with its article.
    """

    sender = "a peer"

    def unexpected(self, envelope: Envelope) -> FrameError:
        """Return the error for an operation that the service does not have."""
        return FrameError(f"{self.sender} may not send {envelope.op.name}; {_SAME}", envelope)

    def rejected(self, peer: Peer, envelope: Envelope | None, reason: str) -> None:
        peer.close()


def text_payload(text: str) -> np.ndarray:
    """Encode a text as a payload, truncated to `TEXT_BYTES`."""
    return np.frombuffer(text.encode()[:TEXT_BYTES], np.uint8)


def frames(envelope: Envelope, shared: Direction | None = None) -> Iterator[bytes]:
    """Yield the frames of an envelope; each frame copies its part of the payload once.

    Args:
      shared: the memory shared with the peer, which carries the payload if a slot is free, or None
        without shared memory.

    >>> [len(frame) for frame in frames(Envelope(Op.PULL))]
    [92]
    """
    payload = envelope.payload
    raw, form = _NO_BYTES, (0, 0, 0)
    if payload is not None:
        raw, form = payload.view(np.uint8), (DTYPES.index(payload.dtype), 1, payload.size)
    slot = None if shared is None else shared.write(raw)
    if slot is not None:
        yield _frame(envelope, form, 0, _NO_BYTES, slot + 1, raw.size)
        return
    # A message without a payload, or with an empty payload, still needs a frame.
    for offset in range(0, max(1, raw.size), CHUNK_BYTES):
        yield _frame(envelope, form, offset, raw[offset : offset + CHUNK_BYTES])


def _frame(
    envelope: Envelope,
    form: tuple[int, int, int],
    offset: int,
    part: np.ndarray,
    slot: int = 0,
    elsewhere: int = 0,
) -> bytes:
    one, length, (dtype, ndim, elements) = envelope, part.size + elsewhere, form
    head = HEAD.pack(
        MAGIC, FORMAT, one.op, dtype, one.flag, ndim, slot, one.tensor, elements, offset, length,
        one.epoch, one.client, one.sequence, one.clock, one.version, one.floor, one.tokens,
    )  # fmt: skip
    # Bytes in a slot of shared memory are not part of the sum, since no network carries them.
    crc = google_crc32c.extend(google_crc32c.value(head), part)
    return b"".join((head, CRC.pack(crc), part.data))


def parse_frame(frame: bytes) -> Header:
    """Parse the header of a frame, after a check that its bytes are intact.

    Raises:
      FrameError: the bytes are not a frame, or the frame has another format.
    """
    if not HEADER_BYTES <= len(frame) <= FRAME_BYTES:
        raise FrameError(
            f"a frame has {len(frame)} bytes, but must have {HEADER_BYTES} to {FRAME_BYTES}; "
            f"{_SAME}"
        )
    (
        magic, version, op, dtype, flag, ndim, slot, tensor, elements, offset, length,
        epoch, client, sequence, clock, at, floor, tokens,
    ) = HEAD.unpack_from(frame)  # fmt: skip
    if magic != MAGIC:
        raise FrameError(
            f"magic {magic!r} is not {MAGIC!r}: these bytes are not a frame of jaxdist; check "
            "the address of the peer"
        )
    if version != FORMAT:
        raise FrameError(f"the frame has format {version} instead of {FORMAT}; {_SAME}")
    view = np.frombuffer(frame, np.uint8)
    found = google_crc32c.extend(google_crc32c.value(frame[: HEAD.size]), view[HEADER_BYTES:])
    if (found,) != CRC.unpack_from(frame, HEAD.size):
        raise FrameError(
            "crc32c does not match: the frame was changed in transit; check the network"
        )
    try:
        known = Op(op)
    except ValueError as error:
        raise FrameError(f"operation {op} is unknown; {_SAME}") from error
    envelope = Envelope(
        known, epoch, client, sequence, clock, at, floor, tokens, bool(flag), tensor
    )
    inline = len(frame) - HEADER_BYTES
    if inline != (0 if slot else length):
        raise FrameError(
            f"the frame declares a payload of {length} bytes, but contains {inline} bytes; {_SAME}",
            envelope,
        )
    if flag > 1 or ndim > 1 or dtype >= len(DTYPES) or (not ndim and (elements or dtype or slot)):
        raise FrameError(
            f"flag {flag}, ndim {ndim} or dtype {dtype} is out of range; {_SAME}", envelope
        )
    spec = Spec(tensor, DTYPES[dtype], elements) if ndim else None
    if spec is None and (length or offset):
        raise FrameError(
            (f"the frame has no payload, but declares {length} bytes at offset {offset}; {_SAME}"),
            envelope,
        )
    return Header(envelope, spec, offset, length, slot - 1 if slot else None)


class Assembler:
    """An assembler of the envelopes of one session from its frames, one envelope at a time.

    Args:
      spec_of: the function from an envelope without its payload to the payload's specification, or
        to None if no payload is allowed. If the function raises a `FrameError`, the envelope is
        refused before memory is allocated.
      shared: the memory to which the peer writes payloads, or None without shared memory.
    """

    def __init__(
        self, spec_of: Callable[[Envelope], Spec | None], shared: Direction | None = None
    ) -> None:
        self._spec_of, self._shared = spec_of, shared
        self._envelope: Envelope | None = None
        self._buffer = np.empty(0, np.uint8)
        self._filled = 0

    def feed(self, frame: bytes) -> Envelope | None:
        """Return the envelope that this frame completes, or None if other frames are missing.

        Raises:
          FrameError: the frame is refused, together with the incomplete envelope.
        """
        try:
            return self._fed(frame)
        except FrameError:
            self._drop()
            raise

    def _fed(self, frame: bytes) -> Envelope | None:
        header = parse_frame(frame)
        envelope = header.envelope
        if self._envelope is None:
            self._begin(header)
        elif envelope != self._envelope:
            raise FrameError(
                (f"{envelope.op.name} begins before the previous envelope is complete; {_SAME}"),
                envelope,
            )
        if header.offset != self._filled or header.length > self._buffer.size - self._filled:
            raise FrameError(
                f"the frame has bytes {header.offset} to {header.offset + header.length} of the "
                f"payload, but {self._filled} of {self._buffer.size} bytes have arrived; {_SAME}",
                envelope,
            )
        self._take(header, frame)
        if self._filled < self._buffer.size:
            # Frames without bytes could follow one another for ever without completing the
            # envelope.
            if not header.length:
                raise FrameError(
                    f"the payload is incomplete, but a frame contains none of its bytes; {_SAME}",
                    envelope,
                )
            return None
        spec, buffer = header.spec, self._buffer
        self._drop()
        return envelope if spec is None else replace(envelope, payload=buffer.view(spec.dtype))

    def _take(self, header: Header, frame: bytes) -> None:
        """Copy the bytes of a frame, which are after its header or in shared memory."""
        into = self._buffer[self._filled : self._filled + header.length]
        if header.slot is None:
            into[:] = np.frombuffer(frame, np.uint8, offset=HEADER_BYTES)
        elif self._shared is None or not self._shared.read(header.slot, into):
            raise FrameError(
                (f"slot {header.slot} of the shared memory does not hold this payload; {_SAME}"),
                header.envelope,
            )
        self._filled += header.length

    def _begin(self, header: Header) -> None:
        envelope, given = header.envelope, header.spec
        wanted = self._spec_of(envelope)
        if wanted is None or given is None:
            if wanted is not given:
                needs, must = (
                    "has no payload, but needs one",
                    "has a payload, but must not have one",
                )
                which = needs if given is None else must
                raise FrameError(f"{envelope.op.name} {which}; {_SAME}", envelope)
        elif wanted.most or envelope.op in CARRY_BYTES:
            if given.dtype != wanted.dtype or given.length > wanted.length:
                what = "a text" if envelope.op in CARRY_TEXT else "a payload of rows"
                raise FrameError(
                    f"{what} with {given.length} elements of {given.dtype} is refused: at most "
                    f"{wanted.length} of {wanted.dtype} are allowed; {_SAME}",
                    envelope,
                )
        elif given != wanted:
            raise FrameError(
                f"the payload is tensor {given.tensor}, {given.dtype}[{given.length}], but tensor "
                f"{wanted.tensor}, {wanted.dtype}[{wanted.length}] is expected; {_SAME}",
                envelope,
            )
        self._envelope = envelope
        self._buffer = np.empty(0 if given is None else given.size_bytes, np.uint8)
        self._filled = 0

    def _drop(self) -> None:
        self._envelope, self._buffer, self._filled = None, np.empty(0, np.uint8), 0


def spec_for(envelope: Envelope, push: Spec, shard: Spec) -> Spec | None:
    """Return the specification of an envelope's payload, or None if no payload is allowed.

    Args:
      push: the specification of the payload of a push.
      shard: the specification of parameters.
    """
    if envelope.op in CARRY_TEXT:
        return Spec(envelope.tensor, np.dtype(np.uint8), TEXT_BYTES)
    if envelope.op in (Op.SECURE, Op.SECURED):
        return Spec(envelope.tensor, np.dtype(np.uint8), SECURE_BYTES)
    if envelope.op not in CARRY_SHARD:
        return None
    return push if envelope.op is Op.PUSH else shard
