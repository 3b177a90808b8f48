"""The command `jaxdist`, before its imports, during which Ctrl-C ends it as quietly as later."""

from __future__ import annotations

import os
import signal
from types import FrameType

INTERRUPTED = 130


def main() -> None:
    """Entry point of the `jaxdist` command."""
    # Where SIGINT is ignored, as in the background of a shell, it stays so.
    heard = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if heard:
        signal.signal(signal.SIGINT, _end)
    from jaxdist.cli import main as command

    if heard:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    command()


def _end(number: int, frame: FrameType | None) -> None:
    # Nothing was begun that had to be closed, and what is half imported catches exceptions.
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    main()
