"""The local engine, which runs `jaxdist train`, or an agent if there are several processes."""

from __future__ import annotations

from typing import ClassVar, Literal

from jaxdist.launch.contract import Engine, Job, Rendered, one_node


class Local(Engine):
    """The engine that runs a job on this machine."""

    program: ClassVar[str] = "jaxdist"
    install: ClassVar[str] = "pip install jaxdist"
    type: Literal["local"] = "local"
    """The name that selects this engine."""

    def check(self, job: Job) -> None:
        one_node(job, "local")

    def render(self, job: Job) -> Rendered:
        several = ("--elastic", "--processes", str(job.processes)) if job.processes > 1 else ()
        return Rendered({}, tuple(job.train(*several)), waits=True)
