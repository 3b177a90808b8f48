"""The sources of preemption notices, which announce that this machine will be taken away.

A source waits in a separate thread; the first notice stops the run as a signal does: at the next
step boundary, with a checkpoint. Signals are not sources here: `Termination` handles signals.
"""

from __future__ import annotations

import threading
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from pydantic import PositiveFloat

from jaxdist.config.schema import Config, FilePath

GCE_URL = "http://metadata.google.internal/computeMetadata/v1/instance/preempted"
GCE_HEADERS = {"Metadata-Flavor": "Google"}
QUESTION_SECONDS, AGAIN_SECONDS = 60.0, 5.0
"""QUESTION_SECONDS: the seconds after which a request that waits for a change is repeated.
AGAIN_SECONDS: the seconds after which a failed request is repeated.
"""
# The metadata server can only be reached from this machine, and not through a proxy.
_NO_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Notice(Protocol):
    """A source of preemption notices."""

    name: str
    """The name of the notice in messages to the user."""

    def wait(self, over: threading.Event) -> bool:
        """Wait for the notice and return True; return False soon after `over` is set."""
        ...


class FileNotice:
    """A notice that is given by the appearance of a file.

    Args:
      seconds: the seconds between two checks.
    """

    def __init__(self, path: Path, seconds: float) -> None:
        self.path, self.name, self._seconds = path, f"{path} has appeared", seconds

    def wait(self, over: threading.Event) -> bool:
        """Wait until the file exists and return True; return False soon after `over` is set."""
        while not over.is_set():
            if self.path.exists():
                return True
            over.wait(self._seconds)
        return False


class MetadataNotice:
    """Google's metadata server, which returns TRUE when this machine is preempted.

    The section "detecting preemption" of
    https://cloud.google.com/compute/docs/instances/create-use-preemptible describes the server. The
    first request asks for the current value, and each later request waits for a change. If the
    server does not answer, the run continues, and the request is repeated.

    Args:
      say: a function that prints a line, once, if the server does not answer.
    """

    name = "the metadata server says that this machine is preempted"

    def __init__(self, url: str, say: Callable[[str], None]) -> None:
        self._url, self._say, self._failed = url, say, False

    def wait(self, over: threading.Event) -> bool:
        """Wait for the notice and return True.

        Once `over` is set, return False after the request in progress.
        """
        url = self._url
        while not over.is_set():
            answer = self._asked(url)
            if answer == "TRUE":
                return True
            if answer is None:
                over.wait(AGAIN_SECONDS)
            else:
                url = f"{self._url}?{urllib.parse.urlencode({'wait_for_change': 'true'})}"
        return False

    def _asked(self, url: str) -> str | None:
        request = urllib.request.Request(url, headers=GCE_HEADERS)
        try:
            with _NO_PROXY.open(request, timeout=QUESTION_SECONDS) as answer:
                return answer.read(64).decode("ascii", "replace").strip()
        except TimeoutError:
            return ""  # The server answers only when the value changes.
        except (OSError, ValueError) as error:
            if not self._failed:
                self._failed = True
                self._say(
                    f"preemption: {self._url} does not answer ({error}); the request is repeated"
                )
            return None


class PreemptionConfig(Config):
    """The sources of a preemption notice, besides signals; a notice from any source is enough."""

    file: FilePath | None = None
    """A file whose appearance is a preemption notice; null watches no file."""
    file_seconds: PositiveFloat = 0.5
    """The time, in seconds, between two checks for the file."""
    gce: bool = False
    """Whether to ask Google's metadata server for a preemption notice. Set it on preemptible VMs of
    Google Cloud."""
    gce_url: str = GCE_URL
    """The address of Google's metadata server."""

    def build(self, say: Callable[[str], None]) -> list[Notice]:
        """Build the sources of preemption notices that the settings select."""
        found: list[Notice] = []
        if self.file is not None:
            found.append(FileNotice(self.file, self.file_seconds))
        if self.gce:
            found.append(MetadataNotice(self.gce_url, say))
        return found


@contextmanager
def heard(notices: Sequence[Notice], tell: Callable[[str], None]) -> Iterator[None]:
    """Wait for notices within the block, and call `tell` with the name of each notice that comes.

    Each wait runs in a separate daemon thread, which does not keep the process from exiting.
    """
    over = threading.Event()

    def listen(notice: Notice) -> None:
        if notice.wait(over) and not over.is_set():
            tell(notice.name)

    for notice in notices:
        threading.Thread(target=listen, args=(notice,), name="notice", daemon=True).start()
    try:
        yield
    finally:
        over.set()
