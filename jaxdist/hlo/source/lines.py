"""The lines of source code to which the instructions of a compiled program belong."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import PurePath

from jaxdist.hlo.parse import Module


class Lines:
    """A function from the name of an instruction to its line of code.

    The lines are from tables in the text of a compiled program.

    Args:
      text: the text of the compiled program.
      module: the same program, parsed.
      libraries: parts of paths. A file is skipped if its path contains any of these parts.
    """

    def __init__(self, text: str, module: Module, libraries: Sequence[str]) -> None:
        self._libraries = libraries
        head = text.partition("\nFileNames\n")[2].partition("\n\n")[0]
        self._files = dict(re.findall(r'^(\d+) "(.*)"$', head, re.MULTILINE))
        places = re.findall(r"^(\d+) \{file_name_id=(\d+) .*?\bline=(\d+)", text, re.MULTILINE)
        self._places = {number: (file, line) for number, file, line in places}
        frames = re.findall(
            r"^(\d+) \{file_location_id=(\d+)(?: parent_frame_id=(\d+))?", text, re.MULTILINE
        )
        self._frames = {number: (place, parent) for number, place, parent in frames}
        self._attributes = {
            instruction.name: instruction.attributes
            for computation in module.computations.values()
            for instruction in computation.instructions
        }

    def __call__(self, name: str) -> str:
        """Return the file and line of an instruction's innermost frame outside of libraries.

        The result is "in a library" if there is no such frame.
        """
        found = re.search(r"stack_frame_id=(\d+)", self._attributes.get(name, ""))
        frame, seen = found[1] if found else "", set[str]()
        while frame in self._frames and frame not in seen:
            seen.add(frame)
            place, parent = self._frames[frame]
            file, line = self._places.get(place, ("", ""))
            path = self._files.get(file, "")
            if path and not any(part in path for part in self._libraries):
                return f"{PurePath(path).name}:{line}"
            frame = parent
        return "in a library"
