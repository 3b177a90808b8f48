"""A cache by which equal programs are compiled once in a process."""

from __future__ import annotations

import io
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import sha256
from typing import Any

from jax._src import compiler

PROGRAMS = 32
"""The number of compiled programs that the cache holds."""


def share_programs() -> None:
    """Compile a program only once, even if a test builds the program again.

    Two programs are equal if they have the same text, names of scopes, options and devices. An
    equal program is still traced and lowered again.
    """
    compile_anew = compiler.backend_compile_and_load
    kept: OrderedDict[tuple[object, ...], Any] = OrderedDict()

    def compile_once(
        backend: Any, module: Any, devices: Any, options: Any, callbacks: Sequence[Any]
    ) -> Any:
        given = backend, module, devices, options, callbacks
        if callbacks:  # callbacks belong to a single executable
            return compile_anew(*given)
        text = io.BytesIO()
        module.operation.write_bytecode(text)
        places = tuple(device.id for device in devices)
        digest = sha256(text.getbuffer()).digest()
        key = (backend, digest, options.SerializeAsString(), places)
        found = kept.pop(key, None)
        if found is None:
            found = compile_anew(*given)
        kept[key] = found
        while len(kept) > PROGRAMS:
            kept.popitem(last=False)
        return found

    compiler.backend_compile_and_load = compile_once
