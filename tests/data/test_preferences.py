"""Pairs of answers: their forms, the tokens with a loss, and rows that are wrong."""

import itertools
import json

import jax
import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from jaxdist.config import Document, validate
from jaxdist.data.text.preferences import PreferencesConfig
from jaxdist.errors import DataError
from jaxdist.experiment import ExperimentConfig, build

TEMPLATE = (
    "{% for message in messages %}{{ '<' + message['role'] + '>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
YES = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "yes"}]
NO = [YES[0], {"role": "assistant", "content": "no"}]
ROWS = [
    {"prompt": "q", "chosen": "yes", "rejected": "no"},
    {"chosen": YES, "rejected": NO},
    {"prompt": YES[:1], "chosen": YES[1:], "rejected": NO[1:]},
]


@pytest.fixture
def section(tmp_path):
    vocab = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = tokenizers.Tokenizer(models.BPE(vocab, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.save(str(tmp_path / "tokenizer.json"))
    settings = json.dumps({"chat_template": TEMPLATE})
    (tmp_path / "tokenizer_config.json").write_text(settings)

    def of(rows, **more):
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        (tmp_path / "rows.jsonl").write_text("\n".join(lines))
        given = {"type": "preferences", "files": [str(tmp_path / "rows.jsonl")], "window": 40}
        tokenizer = {"type": "bpe", "file": str(tmp_path / "tokenizer.json")}
        return {**given, "heldout_fraction": 0, "tokenizer": tokenizer, **more}

    return of


def built(given):
    return validate(Document(given), PreferencesConfig).build()


def test_the_forms_of_a_row_are_one_example(section):
    found = built(section(ROWS))
    rows = found.train.take(np.arange(3))
    assert rows["tokens"].shape == (3, 2, 41)
    for name, array in rows.items():
        np.testing.assert_array_equal(array[0], array[1], err_msg=name)
        np.testing.assert_array_equal(array[0], array[2], err_msg=name)
    for pair, text in enumerate(("yes", "no")):
        said = rows["tokens"][0, pair, 1:][rows["answer"][0, pair] > 0]
        assert found.tokenizer.decode(said.tolist()).strip() == text


def test_earlier_answers_are_of_the_prompt(section):
    before = [*YES, {"role": "user", "content": "r"}]
    found = built(section([{"prompt": before, "chosen": "good", "rejected": "bad"}], window=80))
    row = found.train[0]
    said = row["tokens"][0, 1:][row["answer"][0] > 0]
    assert found.tokenizer.decode(said.tolist()).strip() == "good"


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("{", "is not JSON"),
        ("[1]", "is not a pair of answers (found: list)"),
        ({"prompt": "q", "chosen": "a"}, "is not a pair of answers (found: ['chosen', 'prompt'])"),
        ({"prompt": "q", "chosen": "a", "rejected": " "}, "rejected is neither a text nor a list"),
        ({"prompt": 3, "chosen": "a", "rejected": "b"}, "prompt is neither a text nor a list"),
        ({"chosen": "a", "rejected": "b"}, "chosen has no message before its answer"),
        ({"chosen": [*YES, YES[0]], "rejected": NO}, "chosen has no answer at its end"),
        ({"prompt": "q", "chosen": "a", "rejected": "a"}, "chosen and rejected are alike"),
        (
            {"chosen": YES, "rejected": [{"role": "user", "content": "z"}, NO[1]]},
            "answer different prompts",
        ),
        ({"prompt": "q" * 50, "chosen": "a", "rejected": "b"}, "of 1 pairs, none can be used"),
    ],
)
def test_a_wrong_row_is_named(section, row, said):
    with pytest.raises(DataError) as refused:
        built(section([row]))
    assert said in str(refused.value)


# The loss of pairs: tests/models/test_dpo.py; a run's own, beside another library's:
# tests/interchange/test_tuned.py.
@pytest.mark.slow
def test_a_model_trains_on_pairs(section):
    sections = {
        "model": {"type": "gpt", "layers": 1, "embed": 8, "heads": 2, "mlp": 8,
                  "lora": {"rank": 2, "alpha": 2, "targets": ["blocks/*"]}},
        "loss": {"type": "dpo"},
        "data": section(ROWS, window=32),
        "optim": {"type": "sgd", "learning_rate": 0.1},
        "train": {"steps": 1, "batch_size": 2},
        "mesh": {"data": 2},
    }  # fmt: skip
    config = validate(Document(sections), ExperimentConfig)
    made = build(config, devices=jax.devices()[:2])
    with made.loader.batches() as batches:
        (batch,) = itertools.islice(batches, 1)
    _, metrics = made.program.train(made.program.init(), batch)
    assert float(metrics[0]) == pytest.approx(np.log(2), rel=1e-6)
