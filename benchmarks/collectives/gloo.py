"""The peer `torch.distributed` over gloo: processes that all-reduce the sizes that they read."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from jaxdist.errors import RunError

PEER = Path(__file__).with_name("peer.py")


class Gloo:
    """Processes that all-reduce at a call, and between calls wait for input without any work."""

    def __init__(self, process: subprocess.Popen[str]):
        self._process = process
        self._wait()

    def all_reduce(self, size_bytes: int, times: int = 1) -> None:
        """Sum float32 over all processes, `times` times, and return when all processes are done.

        Raises:
          RunError: a process has ended.
        """
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # `_wait` raises with the exit code
            print(size_bytes, times, file=self._process.stdin, flush=True)
        self._wait()

    def _wait(self) -> None:
        assert self._process.stdout is not None
        if not self._process.stdout.readline():
            code = self._process.wait()
            raise RunError(
                f"the processes of torch.distributed over gloo ended with exit code {code}: run "
                f"`python {PEER} 2 STORE`, STORE a new file's name, to see why"
            )


@contextmanager
def gloo(world: int) -> Iterator[Gloo]:
    """Start `world` processes joined over loopback; they end with the context in any case.

    Raises:
      RunError: the processes do not start.
    """
    with ExitStack() as stack:
        store = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "store"
        command = [sys.executable, str(PEER), str(world), str(store)]
        process = stack.enter_context(
            subprocess.Popen(
                command,
                text=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        )
        try:
            yield Gloo(process)
        except BaseException:
            # `Popen` waits for the process on exit, and it may be stuck in an all-reduce.
            process.kill()
            raise
