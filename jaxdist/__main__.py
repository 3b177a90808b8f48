"""The entry point of the command `jaxdist`, which Ctrl-C ends without a traceback."""

from __future__ import annotations

import os
import signal
from types import FrameType

INTERRUPTED = 130


def main() -> None:
    """Run the command `jaxdist`."""
    # If SIGINT is ignored, as in a background job of a shell, it must remain ignored.
    heard = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if heard:
        signal.signal(signal.SIGINT, _end)
    from jaxdist.cli import main as command

    if heard:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    command()


def _end(number: int, frame: FrameType | None) -> None:
    # The process ends without an exception, because a module that is being imported could catch the
    # exception. There is nothing to clean up.
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    main()
