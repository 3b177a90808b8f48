"""A run on data with a bad example, in two bytes, in stages: from the command line to the files."""

from __future__ import annotations

import shutil
import textwrap

import numpy as np
import pytest
from runs import DIGITS, Jaxdist, assert_same_run, checkpoint, metrics, steps

BAD = textwrap.dedent("""
    import numpy as np

    class Images:
        def __init__(self, bad):
            self.bad = bad
        def __len__(self):
            return 96
        def __getitem__(self, i):
            rng = np.random.default_rng(i)
            label = i % 3
            image = rng.normal(size=(8, 8, 1)).astype(np.float32) / 4 + label - 1
            return {"image": image + (np.nan if i in self.bad else 0), "label": np.int32(label)}

    def one():
        return Images({5}), Images(())

    def all():
        return Images(range(96)), Images(())
""")


def write_config(jaxdist: Jaxdist, data: str, **optim: object) -> None:
    (jaxdist.folder / "bad.py").write_text(BAD)
    ramp = {"start_batch_size": 8, "increment": 8, "ramp_examples": 48}
    sections = {**DIGITS, "optim": {"type": "lamb", "learning_rate": 0.02, **optim}}
    jaxdist.config(
        sections,
        data={"type": "import", "path": f"bad:{data}", "classes": 3, "unchecked": ["image"]},
        train={"steps": 30, "batch_size": 16, "batch_ramp": ramp},
        eval={"every": 15, "batches": None},
        checkpoint={"every": 15},
        mesh={"data": 8},
    )


@pytest.mark.full
def test_a_bad_example_costs_its_steps_and_nothing_else(jaxdist: Jaxdist) -> None:
    write_config(
        jaxdist,
        "one",
        loss_scale={"type": "dynamic", "growth_steps": 10},
        master_weights="bfloat16",
        bf16_moments=True,
        skip_spikes={},
    )
    done = jaxdist.here("train", "config.yaml")
    assert (done.code, done.err) == (0, ""), done
    assert "plan   steps 1 to 6: batch 8\nplan   steps 7 to 30: batch 16\n" in done.out
    records = [record for record in metrics(jaxdist.run) if record["split"] == "train"]
    # 6 x 8 + 24 x 16 = 432 examples are four and a half epochs of 96, each with example 5 once.
    assert records[-1]["skipped_steps"] in (4, 5)
    assert {record["loss"] for record in records if record["skipped_in_a_row"]} == {"nan"}
    assert {record["loss_scale"] for record in records} > {2.0**15, 2.0**14}
    assert steps(jaxdist.run) == [15, 30]
    saved = checkpoint(jaxdist.run, 30)
    kernel = next(value for name, value in saved.items() if name.startswith("params"))
    assert str(kernel.dtype) == "bfloat16"
    assert all(np.isfinite(value.astype(np.float32)).all() for value in saved.values())
    judged = jaxdist.here("eval", jaxdist.run, "--step", 15)
    assert judged.code == 0, judged


def test_a_run_that_only_skips_ends_with_the_reason(jaxdist: Jaxdist) -> None:
    write_config(jaxdist, "all", skip_nonfinite=True, max_skipped=3)
    done = jaxdist.here("train", "config.yaml")
    assert done.code == 3
    assert "4 consecutive steps were skipped (at most 3 are allowed; 4" in done.message


def test_show_says_how_derived_values_came_about(jaxdist: Jaxdist) -> None:
    scale_from = {"batch_size": 16, "learning_rate": 0.01, "warmup_epochs": 1}
    jaxdist.config(
        {**DIGITS, "optim": {"type": "lamb", "scale_from": scale_from}},
        train={"steps": None, "epochs": 8},
    )
    shown = jaxdist.here("config", "show", "config.yaml")
    assert (shown.code, shown.err) == (0, ""), shown
    assert shown.out.splitlines()[-2:] == [
        "derived: learning rate 0.02 = 0.01 x sqrt(64 / 16), rule lamb",
        "derived: warm-up 90 of 180 steps (50%) = 1 of 8.011 epochs at batch 16 x 64 / 16, rule "
        "lamb",
    ]


@pytest.mark.slow
def test_all_that_counts_steps_goes_on_to_the_bit(jaxdist: Jaxdist) -> None:
    """Slow weights, spikes, the loss scale, a ramp and a warm-up, from amid each of them."""
    scale = {"type": "dynamic", "growth_steps": 10}
    write_config(
        jaxdist,
        "one",
        loss_scale=scale,
        skip_spikes={"factor": 1.2, "window": 10},
        schedule={"type": "cosine", "warmup_steps": 40},
    )
    ramp = "train.batch_ramp={start_batch_size: 8, increment: 8, ramp_examples: 400}"
    more = [
        "strategy={type: lookahead, steps: 7, momentum: 0.9}",
        *("train.steps=60", ramp, "eval.every=null"),
        "checkpoint={every: 31, keep: 5, keep_best: false}",
    ]
    done = jaxdist.here("train", "config.yaml", *more)
    assert done.code == 0, done
    assert "import: bad:one: 96" in done.out  # and no picture in its place
    whole = jaxdist.folder / "whole"
    shutil.copytree(jaxdist.run, whole)
    last = [one for one in metrics(whole) if one["split"] == "train"][-1]
    assert last["skipped_steps"] > 4  # spikes beside the bad example
    shutil.rmtree(jaxdist.run / "checkpoints" / "step_00000060")
    done = jaxdist.here("train", "config.yaml", "--resume", *more)
    assert done.code == 0, done
    assert "resume from step 31 of 60" in done.out
    assert_same_run(jaxdist.run, whole)
