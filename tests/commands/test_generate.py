"""What `generate` refuses."""

from types import SimpleNamespace

import pytest
from rich.console import Console

from jaxdist.commands import evaluate
from jaxdist.errors import RunError
from jaxdist.train.sampling import Sampling


@pytest.mark.parametrize(
    ("tokenizer", "batch", "words"),
    [(None, {}, "not trained on text"), ("bytes", {"targets": 0}, "generate needs a decoder")],
)
def test_models_that_cannot_continue_a_text_are_refused(
    monkeypatch, tmp_path, tokenizer, batch, words
):
    experiment = SimpleNamespace(
        dataset=SimpleNamespace(tokenizer=tokenizer), program=SimpleNamespace(batch=batch)
    )
    monkeypatch.setattr(evaluate, "open_run", lambda *_, **__: (experiment, None))
    settings = {"prompts": [""], "tokens": 1, "sampling": Sampling(), "console": Console()}
    with pytest.raises(RunError, match=words):
        evaluate.generate_from_run(tmp_path, **settings)
