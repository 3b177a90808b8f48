"""Run a command that ends when this process's input does: `python -m jaxdist.launch.tied COMMAND`.

The parent process holds the other end of the input: when it is killed, nothing that it started
continues. SIGTERM is passed on; the exit code is the command's.
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
    """Run the command and return its exit code; 128 plus the number for a signal."""
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
