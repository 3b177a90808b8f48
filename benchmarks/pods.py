"""The jobs of `configs/` that need a pod, by formulas: memory, time, energy and carbon of each.

    python -m benchmarks.pods        # seconds, on any machine

Nothing is measured or compiled. Each job has the mesh and the settings of its config. Energy counts
every chip at its highest published power all the time, and carbon the world's average grid.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxdist.cost.energy import POWERS, Site
from jaxdist.experiment import ExperimentConfig, load
from jaxdist.planner.plan import Plan
from jaxdist.planner.search import Judged, judge_plan, model_of
from jaxdist.planner.target import Target, meshes, parse_target

SITE = Site(pue=1.0, grid=475.0)
PAPER_MINUTES = 76.19
"""BERT-large on 1024 TPU v3 with both phases (arXiv 1904.00962, table 1)."""
JOBS = (
    ("configs/gpt/1.3b.yaml", "v4:4x4x4"),
    ("configs/gpt/70b.yaml", "v4:8x8x16"),
    ("configs/gpt/175b.yaml", "v4:8x8x16"),
    ("configs/gpt/1t.yaml", "v4:16x16x16"),
    ("configs/bert/large.yaml", "v4:8x8x16"),
    ("configs/bert/large_512.yaml", "v4:8x8x16"),
    ("configs/bert/large.yaml", "v5p:8x8x16"),
    ("configs/bert/large_512.yaml", "v5p:8x8x16"),
)


@dataclass(frozen=True)
class Priced:
    """A job with the prediction of its step.

    Attributes:
      parameters: number of the model's parameters, or None if the formulas do not count them.
    """

    config: ExperimentConfig
    target: Target
    judged: Judged
    parameters: int | None
    mfu: float

    @property
    def joules(self) -> float | None:
        """The energy of a step, or None for chips without a published power."""
        power = POWERS.get(self.target.device.name)
        return None if power is None else power.most * self.target.chips * self.seconds

    @property
    def seconds(self) -> float:
        """The time of a step."""
        return self.judged.seconds.total


def plan_of(config: ExperimentConfig, chips: int) -> Plan:
    """Return the plan of a config on a number of chips."""
    sizes = {name: size for name, size in config.mesh.sizes().items() if isinstance(size, int)}
    stage, tensor = sizes.get("stage", 1), sizes.get("tensor", 1)
    pipeline, remat = config.parallel.pipeline, getattr(config.model, "remat", None)
    return Plan(
        data=chips // (stage * tensor),
        stage=stage,
        tensor=tensor,
        zero=config.parallel.zero.stage,
        offload=config.parallel.zero.offload,
        remat=remat if config.model.type == "gpt" else None,
        microbatches=config.train.microbatches,
        schedule="1f1b" if stage > 1 else None,
        stash=stage > 1 and pipeline.activations == "stash",
        ahead=pipeline.ahead,
    )


def price(path: str, on: str) -> Priced:
    """Predict a step of a config on a pod."""
    document, config = load(path)
    target, model = parse_target(on), model_of(config, document)
    plan = plan_of(config, target.chips)
    wanted = (plan.stage, plan.data, plan.tensor)
    places = next(places for places in meshes(target) if places.sizes == wanted)
    judged = judge_plan(model, plan, places, target)
    mfu = judged.mfu(model, target, masked=False)
    return Priced(config, target, judged, getattr(model, "parameters", None), mfu)


def row(path: str, on: str, job: Priced) -> str:
    """Format a job as a row of the table."""
    steps, name = job.config.train.steps or 0, path.removeprefix("configs/").removesuffix(".yaml")
    size = "" if job.parameters is None else f"{job.parameters / 1e9:,.4g} B"
    used, limit = job.judged.memory.total / 1e9, job.judged.limit_bytes / 1e9
    cells = [name, size, f"`{on}`", job.judged.plan.words(), f"{used:.1f} of {limit:.1f} GB"]
    cells += [f"{job.seconds:.3g} s", f"{job.mfu:.0%}", f"{steps * job.seconds / 86400:,.3g} days"]
    if job.joules is None:
        return f"| {' | '.join([*cells, 'unknown', ''])} |"
    run = steps * job.joules
    cells += [f"{job.joules / 1e6:,.3g} MJ, {SITE.kwh(run) / 1e3:,.3g} MWh"]
    return f"| {' | '.join([*cells, f'{SITE.grams(run) / 1e6:,.3g} t'])} |"


def main() -> None:
    """Print the table, and the time of both phases of BERT with the paper's time."""
    print("| job | parameters | chips | plan | memory | step | MFU | run | energy | CO2e |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    minutes: dict[str, float] = {}
    for path, on in JOBS:
        job = price(path, on)
        print(row(path, on, job))
        if "bert" in path:
            spent = (job.config.train.steps or 0) * job.seconds / 60
            minutes[on] = minutes.get(on, 0.0) + spent
    for on, total in minutes.items():
        print(f"\nBERT-large, both phases, on `{on}`: {total:.1f} minutes; ", end="")
        print(f"the paper, on 1024 TPU v3: {PAPER_MINUTES:.0f}")


if __name__ == "__main__":
    main()
