"""The config section that chooses a pipeline schedule by its `type`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from jaxdist.pipeline_schedules.csv_form import Csv
from jaxdist.pipeline_schedules.dual_pipe_v import DualPipeV
from jaxdist.pipeline_schedules.gpipe import GPipe
from jaxdist.pipeline_schedules.interleaved import BreadthFirst, Interleaved
from jaxdist.pipeline_schedules.one_f_one_b import OneFOneB
from jaxdist.pipeline_schedules.zero_bubble.auto import ZBAuto
from jaxdist.pipeline_schedules.zero_bubble.h1 import ZBH1, ZBH2
from jaxdist.pipeline_schedules.zero_bubble.v import ZBV, VHalf, VMin

PipelineScheduleConfig = Annotated[
    GPipe
    | OneFOneB
    | Interleaved
    | BreadthFirst
    | ZBH1
    | ZBH2
    | ZBAuto
    | ZBV
    | VHalf
    | VMin
    | DualPipeV
    | Csv,
    Field(discriminator="type"),
]
"""The configs of all schedules. The method `build(stages, microbatches)` of each returns the
`Schedule`, or raises ConfigError if the schedule does not support these numbers."""
