"""The choice of a schedule in a config, by `type:`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from jaxdist.parallel.pipeline.schedules.csv_form import Csv
from jaxdist.parallel.pipeline.schedules.dual_pipe_v import DualPipeV
from jaxdist.parallel.pipeline.schedules.gpipe import GPipe
from jaxdist.parallel.pipeline.schedules.interleaved import BreadthFirst, Interleaved
from jaxdist.parallel.pipeline.schedules.one_f_one_b import OneFOneB
from jaxdist.parallel.pipeline.schedules.zero_bubble import ZBH1, ZBH2
from jaxdist.parallel.pipeline.schedules.zero_bubble_auto import ZBAuto
from jaxdist.parallel.pipeline.schedules.zero_bubble_v import ZBV, VHalf, VMin

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
"""Each has `build(stages, microbatches)`, which gives the `Schedule`, or refuses with a reason."""
