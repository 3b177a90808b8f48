"""A program that runs a command and kills it at the end of input, when the parent process ends.

The parent runs `python -m jaxdist.launch.tied COMMAND` and holds the other end of the input: when
the parent is killed, the input ends, and the command is killed with everything that it started. The
program passes SIGTERM on to the command, and exits with the command's exit code.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from types import FrameType

from jaxdist.runtime.children import wait_for_input_end


def main(command: list[str]) -> int:
    """Run a command and return its exit code, which is 128 + N if signal N ended the command."""
    # The command gets its own session, so that `killpg` reaches everything that it starts.
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)

    def end() -> None:
        wait_for_input_end()
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)

    def pass_on(number: int, frame: FrameType | None) -> None:
        child.send_signal(number)

    signal.signal(signal.SIGTERM, pass_on)
    threading.Thread(target=end, daemon=True).start()
    code = child.wait()
    return 128 - code if code < 0 else code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
