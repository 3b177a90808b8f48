"""The names that GGUF files have for the ways in which tokenizers cut text."""

import pytest

from jaxdist.errors import DataError
from jaxdist.interchange.tokenizers import SPLITS, pre_of
from jaxdist.interchange.write import config_of
from jaxdist.models.gpt import GptConfig

BYTES, CUT = {"type": "ByteLevel", "use_regex": False}, {"type": "ByteLevel"}
DIGITS = {"type": "Digits", "individual_digits": True}
QWEN = {"type": "Split", "pattern": {"Regex": SPLITS["qwen2"]}, "behavior": "Isolated"}


@pytest.mark.parametrize(
    ("steps", "name"),
    [
        ([CUT], "gpt-2"),
        ([BYTES], None),
        ([DIGITS, CUT], "smollm"),
        ([DIGITS, BYTES], None),
        ([{"type": "Digits"}, CUT], None),
        ([QWEN, BYTES], "qwen2"),
        ([QWEN, CUT], None),
        ([QWEN | {"behavior": "Removed"}, BYTES], None),
        ([QWEN | {"invert": True}, BYTES], None),
        ([QWEN, {**BYTES, "add_prefix_space": True}], None),
        ([QWEN | {"pattern": {"String": " "}}, BYTES], None),
    ],
)
def test_a_cut_has_a_name_only_if_no_step_cuts_again(steps, name):
    assert pre_of({"pre_tokenizer": {"type": "Sequence", "pretokenizers": steps}}) == name


def test_a_config_that_is_no_json_is_one_message(tmp_path):
    (tmp_path / "config.json").write_text("{")
    model = GptConfig(type="gpt", layers=1, embed=8, heads=2)
    with pytest.raises(DataError, match=r"config.json, .* cannot be read: .*repair the file"):
        config_of(model, 16, tmp_path, 8)
