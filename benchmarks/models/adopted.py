"""`jaxdist adopt` for the configs of published models: plans, and the time of the command."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from benchmarks.core.harness import process_seconds
from benchmarks.core.report import Figure
from jaxdist.errors import RunError, first_line
from jaxdist.runtime.environment import python_module
from jaxdist.types import JsonObject

SLICE = "v5p:4x4x4"
PLANS, LIMIT_SECONDS = 3, 300
_LLAMA: JsonObject = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "vocab_size": 128_256,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "tie_word_embeddings": False,
}
PUBLISHED: Mapping[str, JsonObject] = {
    "Llama-3.1-8B": {
        **_LLAMA,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
    "Qwen3-32B": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_act": "silu",
        "vocab_size": 151_936,
        "hidden_size": 5120,
        "intermediate_size": 25_600,
        "num_hidden_layers": 64,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40_960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "use_sliding_window": False,
        "tie_word_embeddings": False,
    },
    "Llama-3.1-70B": {
        **_LLAMA,
        "hidden_size": 8192,
        "intermediate_size": 28_672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
    },
}
"""The `config.json` of each model, without the keys of its tokenizer."""


def figures(name: str) -> Iterator[Figure]:
    """Count the compiled plans of a model, and compare the time of the command with a limit."""
    with tempfile.TemporaryDirectory() as folder:
        yield from adopted(name, Path(folder))


def adopted(name: str, folder: Path) -> Iterator[Figure]:
    """Run `jaxdist adopt` on the config of a model, in a new process."""
    model, found = folder / name, folder / "found.json"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(PUBLISHED[name]))
    command = [*python_module("jaxdist", "adopt", str(model), "--on", SLICE)]
    command += ["--out", str(folder / "job.yaml"), "--json", str(found)]
    try:
        clock, cores = process_seconds(command, timeout_seconds=4 * LIMIT_SECONDS)
    except RunError as error:
        yield Figure.skipped(f"adopt {name}", first_line(error)[:200])
        return
    plans = json.loads(found.read_text())["plans"]
    note = f"on {SLICE}: " + "; ".join(
        f"{one['plan']}: {one['seconds']:.2f} s, {one['bytes'] / 1e9:.1f} GB" for one in plans
    )
    compiled = sum(one["compiled"] for one in plans)
    yield Figure(f"adopt {name}: compiled plans", compiled, PLANS, ">= 1", "", note)
    note = f"seconds of all cores; by the clock, with other work, {clock:.0f}"
    yield Figure(f"adopt {name}: time", cores, LIMIT_SECONDS, "<= 1", "s", note)
