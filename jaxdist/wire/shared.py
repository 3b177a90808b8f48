"""The shared memory between a worker and a server on one machine, which holds payloads.

A session through a socket copies a payload four times and checks each byte twice. Through shared
memory, a payload is only copied in and out. The worker creates the memory (`memfd_create`, sealed
so that no process can truncate it under a reader). The metadata of the call, which the token
protects, contain the memory's location for the server. The server opens the memory through `/proc`,
which the kernel allows only to the same user. The memory has no name, so it is freed when both
processes have ended, even by a kill.

Each direction has `SLOTS` slots with one writer and one reader. A slot belongs to the writer until
its flag is 1, and to the reader until the flag is 0 again. If no slot is free, the payload travels
in frames, as between machines.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import platform
import secrets
from dataclasses import dataclass, field

import numpy as np

SLOTS = 2
"""The number of slots per direction: one slot is written while the other is read."""
LEAST_BYTES = 2**16
"""The smallest payload that uses a slot, in bytes; smaller payloads travel in frames."""
_PAGE = 4096
_NONCE = slice(0, 16)
_FLAGS = slice(64, 64 + 2 * SLOTS)
_SEALS = 0 if not hasattr(fcntl, "F_SEAL_SHRINK") else fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


def supported() -> bool:
    """Return whether two processes can share memory on this platform as this module does.

    A flag must become visible after the copy that it announces; x86 guarantees this order of
    stores.
    """
    return bool(
        hasattr(os, "memfd_create") and _SEALS and platform.machine() in ("x86_64", "AMD64")
    )


@dataclass
class Direction:
    """The slots of one direction: one process calls `write`, and the other process calls `read`.

    Attributes:
      flags: `[SLOTS]` uint8: 1 while a slot holds a payload.
      slots: `[SLOTS, slot_bytes]` uint8.
    """

    flags: np.ndarray
    slots: np.ndarray

    def write(self, raw: np.ndarray) -> int | None:
        """Copy bytes `[n]` to a free slot and return the slot, or None if no slot is used.

        No slot is used if all slots are full, or if n is below `LEAST_BYTES` or above the size of a
        slot.
        """
        if not LEAST_BYTES <= raw.size <= self.slots.shape[1]:
            return None
        free = np.flatnonzero(self.flags == 0)
        if not free.size:
            return None
        slot = int(free[0])
        self.slots[slot, : raw.size] = raw
        # The flag is set last, since the reader reads the slot as soon as the flag is 1.
        self.flags[slot] = 1
        return slot

    def read(self, slot: int, into: np.ndarray) -> bool:
        """Copy a payload from a slot to `into`, and free the slot.

        Return False, and copy nothing, if the slot is empty or does not exist, or if `into` is
        larger than a slot.
        """
        if not (slot < SLOTS and into.size <= self.slots.shape[1] and self.flags[slot]):
            return False
        into[:] = self.slots[slot, : into.size]
        # The flag is reset last, since the writer may overwrite the slot as soon as the flag is 0.
        self.flags[slot] = 0
        return True


@dataclass
class Shared:
    """The shared memory of one session.

    Attributes:
      place: the location of the memory, by which other processes of this user open the memory. The
        text is empty except on the worker that created the memory.
      to_server, to_worker: the directions of the session.
    """

    to_server: Direction
    to_worker: Direction
    place: str = ""
    _fd: int = field(default=-1, repr=False)

    def close(self) -> None:
        """Close the descriptor; the memory is freed when no process maps it any more."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _mapped(fd: int, size: int) -> tuple[np.ndarray, Direction, Direction]:
    view = np.frombuffer(mmap.mmap(fd, size), np.uint8)
    flags = view[_FLAGS].reshape(2, SLOTS)
    slots = view[_PAGE:].reshape(2, SLOTS, -1)
    return view, Direction(flags[0], slots[0]), Direction(flags[1], slots[1])


def make(most_bytes: int) -> Shared | None:
    """Create shared memory for payloads of at most `most_bytes`, or return None.

    The result is None if the platform has no shared memory, if `most_bytes` is below `LEAST_BYTES`,
    or if the memory cannot be created.

    The kernel allocates pages of the memory only when they are written.
    """
    if most_bytes < LEAST_BYTES or not supported():
        return None
    slot_bytes = -(-most_bytes // _PAGE) * _PAGE
    size = _PAGE + 2 * SLOTS * slot_bytes
    nonce = secrets.token_bytes(16)
    try:
        fd = os.memfd_create("jaxdist-payloads", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS | fcntl.F_SEAL_SEAL)
        view, to_server, to_worker = _mapped(fd, size)
    except OSError:
        return None
    view[_NONCE] = np.frombuffer(nonce, np.uint8)
    return Shared(to_server, to_worker, f"{os.getpid()}:{fd}:{nonce.hex()}", fd)


def open_shared(place: str) -> Shared | None:
    """Open the memory that a worker of this user created on this machine, or return None.

    A forged location opens nothing else, because the descriptor must be sealed memory of this user
    that begins with the secret in the location.
    """
    if not supported():
        return None
    try:
        pid, number, nonce = place.split(":")
        path = f"/proc/{int(pid)}/fd/{int(number)}"
        expected = bytes.fromhex(nonce)
        # Without O_NONBLOCK, this call would block if a forged location named a pipe.
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except (ValueError, OSError):
        return None
    try:
        found = os.fstat(fd)
        size = found.st_size
        sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS == _SEALS
        whole = size > _PAGE and (size - _PAGE) % (2 * SLOTS * _PAGE) == 0
        if found.st_uid != os.getuid() or not (sealed and whole):
            return None
        view, to_server, to_worker = _mapped(fd, size)
    except OSError:
        return None
    finally:
        os.close(fd)
    same = secrets.compare_digest(view[_NONCE].tobytes(), expected)
    return Shared(to_server, to_worker) if same else None
