"""Schedules and batches that a pipeline cannot have: told before anything is compiled."""

import pytest
from pipeline_configs import experiment

from jaxdist.errors import ConfigError
from jaxdist.pipeline_schedules.csv_form import write_csv
from jaxdist.pipeline_schedules.one_f_one_b import one_f_one_b


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("1F2,", ""), r"mine\.csv: row 2 lacks 1F2: .* all microbatches, 0 to 3: add 1F2, or"),
        (("1F2,", "1F2,1F2,"), r"row 2, column 6: 1F2 repeats row 2, column 5: remove"),
        pytest.param(
            ("1F2,", "what,"),
            r"row 2, column 5: 'what' is not a task: write the chunk, one of F",
            marks=pytest.mark.full,
        ),
        pytest.param((",0F3", ""), r"mine\.csv: row 1 lacks 0F3", marks=pytest.mark.full),
    ],
)
@pytest.mark.every(2)
def test_a_schedule_file_that_is_not_whole_is_refused(change, message, tmp_path, devices):
    path = tmp_path / "mine.csv"
    write_csv(one_f_one_b(stages=2, microbatches=4), path)
    csv = {"schedule": {"type": "csv", "path": str(path)}}
    for count in (2, 8):
        with pytest.raises(
            ConfigError, match=rf"the file has 4 microbatches, but the run has {count}"
        ):
            experiment({"stage": 2}, csv, microbatches=count)
    path.write_text(path.read_text().replace(*change, 1))
    with pytest.raises(ConfigError, match=message):
        experiment({"stage": 2}, csv)


def test_every_batch_of_a_ramp_must_divide_into_the_microbatches_of_the_schedule(devices):
    def made(start):
        ramp = {"start_batch_size": start, "increment": start, "ramp_examples": 32}
        return experiment({"stage": 2}, steps=8, batch_ramp=ramp)

    with pytest.raises(ConfigError, match=r"a batch of 2 does not divide .*x 4 microb.*use 4"):
        made(2)
    first, last = made(8).stages
    assert (first.batch_size, last.batch_size) == (8, 16)
    assert first.program.compute.microbatches == last.program.compute.microbatches == 4


def test_sequences_are_not_split_within_stages_on_cpu(devices):
    rules = {"rules": {"residual_seq": "tensor"}}
    with pytest.raises(ConfigError, match=r"residual_seq tensor with mesh\.stage .* null \(TPU"):
        experiment({"stage": 2, "tensor": 2}, sharding=rules)
    assert experiment({"stage": 2, "data": 2}, sharding=rules).program.compute
