"""The entry of the command `jaxdist`; Ctrl-C during its imports ends it without a traceback."""

from __future__ import annotations

import os
import signal
from types import FrameType

INTERRUPTED = 130


def main() -> None:
    """Entry point of the `jaxdist` command."""
    # If SIGINT is ignored, as for a background job of a shell, it stays ignored.
    heard = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if heard:
        signal.signal(signal.SIGINT, _end)
    from jaxdist.cli import main as command

    if heard:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    command()


def _end(number: int, frame: FrameType | None) -> None:
    # An exception could be caught by a module that is being imported; nothing needs cleaning up.
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    main()
