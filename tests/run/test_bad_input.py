"""What a user can get wrong: one clear message, a non-zero exit code, nothing lost."""

from __future__ import annotations

import pytest
from runs import Finished, Jaxdist, metrics, steps

GPT = "model={type: gpt, layers: 1, embed: 32, heads: 2}"


@pytest.mark.parametrize(
    ("overrides", "code", "parts"),
    [
        (["train.batch_size=many", "model.hiden=[3]", "nosuch=1"], 2,
         ["problems in config.yaml", "train.batch_size = 'many'", "did you mean 'hidden'?",
          "nosuch = 1"]),
        (["mesh.data=3"], 2,
         ["mesh {data: 3} needs 3 devices, but there are 8", "meshes that fit", "{data: 8}"]),
        (["mesh.data=8", "train.batch_size=63"], 2,
         ["batch of 63 does not divide over 8 devices", "use 56 or 64"]),
        (["run.directory=config.yaml/run"], 3,
         ["run directory config.yaml/run cannot be written", "choose another"]),
        (["run.directory=/proc/run"], 3,
         ["run directory /proc/run cannot be written", "choose another"]),
        (["data={type: text, files: 'none/*.txt'}", GPT], 2,
         ["data = {'type': 'text'", "none/*.txt"]),
        (["data={type: text, files: 'empty/*.txt'}", GPT], 2,
         ["data = {'type': 'text'", "empty"]),
        (["data={type: text, files: 'text/*.txt'}"], 2,
         ["model.type mlp needs images"]),
    ],
)  # fmt: skip
def test_refused(jaxdist: Jaxdist, overrides: list[str], code: int, parts: list[str]) -> None:
    jaxdist.config()
    for folder, content in (("empty", ""), ("text", "some words to read " * 400)):
        (jaxdist.folder / folder).mkdir()
        (jaxdist.folder / folder / "a.txt").write_text(content)
        (jaxdist.folder / folder / "b.txt").write_text(content)
    assert_refused(jaxdist.here("train", "config.yaml", *overrides), code, parts)
    assert not (jaxdist.folder / "runs").exists()


def assert_refused(refused: Finished, code: int, parts: list[str]) -> None:
    assert refused.code == code, refused
    assert (refused.out, refused.err[:7]) == ("", "error: ")
    for part in parts:
        assert part in refused.message


@pytest.mark.full
@pytest.mark.parametrize(
    ("overrides", "code", "parts"),
    [
        pytest.param(["mesh.data=3", "--devices", "4"], 2,
                     ["mesh {data: 3} needs 3 devices, but there are 4", "meshes that fit",
                      "{data: 4}"], marks=pytest.mark.slow),
        (["run.directory=/proc/run"], 3,
         ["run directory /proc/run cannot be written", "choose another"]),
    ],
)  # fmt: skip
def test_a_refusal_ends_the_process_with_its_code(
    jaxdist: Jaxdist, overrides: list[str], code: int, parts: list[str]
) -> None:
    jaxdist.config()
    assert_refused(jaxdist.train(*overrides, fresh=code == 2), code, parts)
    assert not (jaxdist.folder / "runs").exists()


STAGES = ["mesh={stage: 2, data: 4}", "train.microbatches=4"]
TOKENS = "data={type: synthetic, kind: tokens, window: 8, vocab_size: 64}"


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        ([], ["mesh.stage 2: Mlp", "leave out mesh.stage"]),
        ([GPT, TOKENS], ["1 layers cannot fill 2 chunks", "use 2 layers or more"]),
        ([GPT, TOKENS, "model.layers=2", "parallel.pipeline.schedule={type: csv, path: mine.csv}"],
         ["mine.csv: row 2 lacks 1F1", "add 1F1"]),
    ],
)  # fmt: skip
def test_a_pipeline_that_cannot_be(
    jaxdist: Jaxdist, overrides: list[str], parts: list[str]
) -> None:
    jaxdist.config()
    (jaxdist.folder / "mine.csv").write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1B1\n")
    refused = jaxdist.here("train", "config.yaml", *STAGES, *overrides)
    assert_refused(refused, 2, [*parts, "error: 1 problem", "parallel.pipeline"])
    assert not (jaxdist.folder / "runs").exists()


def test_no_such_config(jaxdist: Jaxdist) -> None:
    refused = jaxdist.here("train", "confg.yaml")
    assert refused.code == 2
    assert "confg.yaml" in refused.message


@pytest.mark.full
def test_a_loss_that_is_not_finite_ends_the_run(jaxdist: Jaxdist) -> None:
    jaxdist.config(
        optim={"type": "sgd", "learning_rate": 1e30, "schedule": {"warmup_steps": 16}},
        eval={"every": 100},
        checkpoint={"every": 1, "keep": 2},
    )
    ended = jaxdist.here("train", "config.yaml")
    assert ended.code == 3
    assert "error: loss is " in ended.message
    last = steps(jaxdist.run)[-1]
    assert f"the last good checkpoint is step {last}" in ended.message
    assert "Lower optim.learning_rate" in ended.message
    assert metrics(jaxdist.run)[-1]["step"] == last
    calm = jaxdist.here("train", "config.yaml", "--resume", "optim.learning_rate=1e-9")
    assert f"resume from step {last} of" in calm.out
