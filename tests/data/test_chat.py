"""Conversations: their template, the tokens with a loss, their windows, and rows that are wrong."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from jaxdist.config import Document, validate
from jaxdist.data.text.chat import ChatConfig
from jaxdist.errors import DataError, JaxdistError
from jaxdist.experiment import ExperimentConfig, build
from jaxdist.models.loss import next_token, next_token_in_chunks, weighted

CHATML = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKS = ("<|im_start|>", "<|im_end|>", "<|bos|>")
ROWS = [
    {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]},
    {"prompt": "2+2", "completion": "4"},
    {
        "messages": [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b"},
            {"role": "user", "content": "c"},
            {"role": "assistant", "content": "d"},
        ]
    },
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tokenizer of bytes with ChatML's marks, and its template."""
    vocab = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = tokenizers.Tokenizer(models.BPE(vocab, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([*MARKS])
    made.save(str(tmp_path / "tokenizer.json"))
    settings = {"chat_template": CHATML, "bos_token": {"content": "<|bos|>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    return tmp_path


def section(folder: Path, rows: object = ROWS, **more: object) -> ChatConfig:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in list(rows)]  # pyright: ignore
    (folder / "rows.jsonl").write_text("\n".join(lines) + "\n")
    tokenizer = {"type": "bpe", "file": str(folder / "tokenizer.json")}
    given = {"type": "chat", "files": [str(folder / "rows.jsonl")], "tokenizer": tokenizer}
    given |= {"window": 64, "heldout_fraction": 0.0, **more}
    return validate(Document(given), ChatConfig)


def test_answers_and_what_ends_them_have_a_loss_and_nothing_else(folder):
    dataset = section(folder).build()
    tokenizer = dataset.tokenizer
    assert tokenizer is not None
    said = []
    for index in range(len(dataset.train)):
        example = dataset.train[index]
        targets, answer = example["tokens"][1:], example["answer"]
        assert {*np.unique(answer)} <= {0.0, 1.0}
        for number in range(1, example["segments"].max() + 1):
            mine = (answer > 0) & (example["segments"] == number)
            said.append(tokenizer.decode(targets[mine].tolist()))
    assert said == ["hello\n", "4\n", "b\nd\n"]  # decoding leaves marks out


def test_marks_are_single_tokens_and_windows_hold_whole_conversations(folder):
    dataset = section(folder, window=40).build()
    example = dataset.train[0]
    marks = [256 + MARKS.index("<|bos|>"), 256 + MARKS.index("<|im_start|>")]
    # The first mark of the first conversation, and no second conversation that would be cut.
    assert example["tokens"][:2].tolist() == marks
    assert example["tokens"].tolist().count(marks[0]) == example["segments"].max()
    for index in range(len(dataset.train)):
        row = dataset.train[index]
        ends = np.flatnonzero(np.diff(row["segments"]))
        assert not row["answer"][ends].any(), "no conversation predicts the next one"


def test_the_loss_is_the_mean_over_answers(folder):
    dataset = section(folder).build()
    example = {name: jax.numpy.asarray(x[None]) for name, x in dataset.train[0].items()}
    size = dataset.vocab_size or 0
    logits = jax.random.normal(jax.random.key(0), (1, 64, size))
    found = next_token(lambda *_: logits, weighted(example))["loss"]
    nats = -np.asarray(jax.nn.log_softmax(logits))[0, np.arange(64), example["tokens"][0, 1:]]
    mine = example["answer"][0] > 0
    np.testing.assert_allclose(found.total / found.weight, nats[mine].mean(), rtol=1e-5)
    assert found.weight == mine.sum()

    class InPieces:
        hidden = staticmethod(lambda tokens, segments: logits)
        head = staticmethod(lambda x: x)

    pieces = next_token_in_chunks(InPieces(), weighted(example), chunks=4)["loss"]
    np.testing.assert_allclose(pieces.total, found.total, rtol=1e-5)
    assert pieces.weight == found.weight


@pytest.mark.full
def test_a_model_trains_on_conversations(folder):
    model = {"type": "gpt", "layers": 1, "embed": 32, "heads": 2, "isolate_documents": True}
    values = {
        "model": model,
        "data": section(folder).model_dump(mode="json"),
        "optim": {"type": "adamw", "learning_rate": 1e-2},
        "train": {"steps": 1, "batch_size": 1, "microbatches": 1},
    }
    experiment = build(validate(Document(values), ExperimentConfig), devices=jax.devices()[:1])
    shapes = jax.eval_shape(
        experiment.program.train, experiment.program.state_shapes, experiment.program.batch
    )
    assert "skipped_steps" in experiment.program.metrics  # for batches without an answer
    assert shapes[1].shape == (len(experiment.program.metrics),)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ('{"messages": [', "rows.jsonl:2 is not JSON"),
        ({"messages": [{"role": "user", "content": "a"}]}, "no message of the role assistant"),
        ({"prompt": "a", "completion": " "}, "rows.jsonl:2 has an empty answer"),
        ({"text": "a"}, "rows.jsonl:2 is not a conversation (found: ['text'])"),
        ("[1]", "rows.jsonl:2 is not a conversation (found: list)"),
    ],
)
def test_a_row_that_is_wrong_is_named_by_its_line(folder, row, said):
    with pytest.raises(DataError) as refused:
        section(folder, [ROWS[0], row]).build()
    assert said in str(refused.value)


def test_templates_that_refuse_or_rewrite_are_told(folder):
    strict = "{{ raise_exception('roles must alternate') }}"
    (folder / "chat_template.jinja").write_text(strict)
    with pytest.raises(
        DataError, match=r"rows.jsonl:1: .* rejects the conversation: roles must alternate"
    ):
        section(folder).build()
    counts = "{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}"
    (folder / "chat_template.jinja").write_text(counts)
    with pytest.raises(DataError, match="split the conversation into rows"):
        section(folder).build()
    (folder / "chat_template.jinja").write_text("{% for")
    with pytest.raises(DataError, match="malformed at line 1"):
        section(folder).build()
    (folder / "chat_template.jinja").unlink()
    (folder / "tokenizer_config.json").write_text("{}")
    with pytest.raises(DataError, match="has no chat template"):
        section(folder).build()


def test_a_template_cannot_leave_its_sandbox(folder):
    (folder / "chat_template.jinja").write_text("{{ messages.__class__.__mro__ }}")
    with pytest.raises(JaxdistError, match="unsafe"):
        section(folder).build()


def test_jinja_is_asked_for_by_the_extra(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(DataError, match=r"pip install 'jaxdist\[chat\]'"):
        section(folder).build()


def test_windows_too_short_for_any_answer_are_refused(folder):
    with pytest.raises(DataError, match="of 3 conversations, none can be used to train on"):
        section(folder, window=4).build()
