"""Benchmarks: figures measured on this machine, each compared with a reference.

`jaxdist bench NAME` runs a benchmark. Benchmarks belong to a checkout and are not in the wheel.
"""

from __future__ import annotations

import importlib
import inspect
import os
from pathlib import Path
from typing import Any

from benchmarks.core.harness import Sample, alternate_processes, interleave
from benchmarks.core.report import Figure, Report
from jaxdist.errors import JaxdistError, did_you_mean

CHECKOUT = Path(__file__).parents[1]
# Benchmarks start processes of their own modules, with `python -P`, which does not search the
# working directory.
_searched = os.environ.get("PYTHONPATH", "").split(os.pathsep)
if str(CHECKOUT) not in _searched:
    os.environ["PYTHONPATH"] = os.pathsep.join([str(CHECKOUT), *filter(None, _searched)])

__all__ = ["BENCHES", "Figure", "Report", "Sample", "alternate_processes", "interleave", "run"]

BENCHES: dict[str, str] = {
    "attention": "benchmarks.attention:bench",
    "collectives": "benchmarks.collectives.report:bench",
    "compile": "benchmarks.compile:bench",
    "compression": "benchmarks.compression.report:bench",
    "context": "benchmarks.context:bench",
    "elastic": "benchmarks.elastic.report:bench",
    "experts": "benchmarks.experts:bench",
    "gpu": "benchmarks.gpu:bench",
    "hybrid": "benchmarks.hybrid.report:bench",
    "jobs": "benchmarks.jobs.report:bench",
    "models": "benchmarks.models.report:bench",
    "optim": "benchmarks.optim:bench",
    "overhead": "benchmarks.overhead:bench",
    "param-server": "benchmarks.param_server.report:bench",
    "pipeline": "benchmarks.pipeline.report:bench",
    "plan": "benchmarks.planner.report:bench",
    "prove": "benchmarks.prove.report:bench",
    "quickstart": "benchmarks.quickstart:bench",
    "startup": "benchmarks.startup:bench",
    "tpu": "benchmarks.tpu.report:bench",
    "zero": "benchmarks.zero.report:bench",
}
"""The function of each bench as `module:function`, imported when the bench runs.

Each function returns a `Report`.
"""


def run(name: str, json_path: str | os.PathLike[str] | None = None, **options: Any) -> Report:
    """Run the bench `name`, and write its report as JSON to `json_path` if this path is given.

    A bench that can draw has a parameter `plot`, the directory of the pictures. By default the
    pictures go into the directory of `json_path`.

    Raises:
      JaxdistError: there is no such bench, or the bench does not accept an option.
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
