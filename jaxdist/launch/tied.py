"""A program that runs a command, and kills the command when the parent process ends.

The parent runs `python -m jaxdist.launch.tied COMMAND` with a pipe as the standard input. When the
parent ends or is killed, the pipe is closed. The program then kills the command and all processes
that the command has started. The program passes SIGTERM to the command, and exits with the
command's exit code.
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
    """Run a command and return its exit code, or 128 + N if signal N ended the command."""
    # The command is in a new session, so that `killpg` reaches all processes that it starts.
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
