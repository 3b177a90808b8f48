"""Measured figures: ours beside a reference, on this machine. `jaxdist bench NAME` runs one."""

from __future__ import annotations

import importlib
import inspect
import os
from pathlib import Path
from typing import Any

from jaxdist.bench.core.harness import Sample, alternate_processes, interleave
from jaxdist.bench.core.report import Figure, Report
from jaxdist.errors import JaxdistError, did_you_mean

__all__ = ["BENCHES", "Figure", "Report", "Sample", "alternate_processes", "interleave", "run"]

BENCHES: dict[str, str] = {
    "attention": "jaxdist.bench.attention:bench",
    "collectives": "jaxdist.bench.collectives.report:bench",
    "compile": "jaxdist.bench.compile:bench",
    "compression": "jaxdist.bench.compression.report:bench",
    "elastic": "jaxdist.bench.elastic.report:bench",
    "optim": "jaxdist.bench.optim:bench",
    "overhead": "jaxdist.bench.overhead:bench",
    "param-server": "jaxdist.bench.param_server.report:bench",
    "pipeline": "jaxdist.bench.pipeline.report:bench",
    "plan": "jaxdist.bench.planner.report:bench",
    "quickstart": "jaxdist.bench.quickstart:bench",
    "startup": "jaxdist.bench.startup:bench",
    "tpu": "jaxdist.bench.tpu.report:bench",
    "zero": "jaxdist.bench.zero.report:bench",
}
"""Name to `module:function`, imported when run. Each function returns a `Report`."""


def run(name: str, json_path: str | os.PathLike[str] | None = None, **options: Any) -> Report:
    """Run the bench `name`; write its report as JSON where `json_path` says.

    A bench that draws (it takes a directory as `plot`) then draws beside the JSON.

    Raises:
      JaxdistError: no such bench, or an option that it does not take.
    """
    if name not in BENCHES:
        raise JaxdistError(f"no bench is named {name!r}: {did_you_mean(name, BENCHES)}")
    module, _, function = BENCHES[name].partition(":")
    bench = getattr(importlib.import_module(module), function)
    taken = inspect.signature(bench).parameters
    for option, value in options.items():
        if option not in taken:
            hint = did_you_mean(option, taken) if taken else "it takes none"
            raise JaxdistError(f"bench {name!r} takes no option {option}={value!r}: {hint}")
    if json_path is not None and "plot" in taken:
        options.setdefault("plot", Path(json_path).parent)
    report = bench(**options)
    if json_path is not None:
        report.write_json(json_path)
    return report
