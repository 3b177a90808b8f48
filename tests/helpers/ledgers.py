"""Ledgers and inspections with given values, and a small model."""

from __future__ import annotations

from typing import Any

from jaxdist.hlo import Collective, Ledger, Memory
from jaxdist.inspect.program import Inspection

MEMORY = Memory(
    argument_bytes=4_000,
    output_bytes=3_010,
    alias_bytes=3_000,
    temp_bytes=5_000,
    code_bytes=0,
    peak_bytes=9_000,
)

GPT = {
    "model": {"type": "gpt", "layers": 3, "embed": 32, "heads": 2, "vocab_multiple": 32},
    "data": {"type": "synthetic", "kind": "tokens", "vocab_size": 32, "window": 16, "examples": 64},
    "optim": {"type": "adamw", "learning_rate": 1e-3, "schedule": {"type": "constant"}},
    "train": {"steps": 1, "batch_size": 16},
}


def collective(**changes: Any) -> Collective:
    values: dict[str, Any] = {
        "name": "all-reduce.1",
        "kind": "all-reduce",
        "dtypes": ("f32",),
        "payload_bytes": 1_000,
        "axes": ("data",),
        "group_size": 4,
        "groups": (),
        "times_low": 1,
        "times_high": 1,
        "sent_bytes": 1_500.0,
        "is_async": False,
        "overlapped": False,
        "source": "",
    }
    return Collective(**{**values, **changes})


def inspection(*collectives: Collective, **changes: Any) -> Inspection:
    numbers = {name: changes.pop(name) for name in ("flops_low", "flops_high") if name in changes}
    ledger = Ledger(
        collectives=collectives,
        **{"flops_low": 2e9, "flops_high": 2e9, **numbers},
        memory=changes.pop("memory", MEMORY),
        devices=8,
        axes={"data": 4, "tensor": 2},
    )
    values: dict[str, Any] = {
        "config": "config.yaml mesh.data=4",
        "model": "gpt, 1,000 parameters",
        "step": "2,048 tokens",
        "device_kind": "TPU v5 lite",
        "ledger": ledger,
        "program_sha256": "a",
        "model_flops": 8e9,
        "gradient_axes": ("data",),
        "gradient_bound_bytes": 1_500.0,
        "arguments": {"parameters": 1_000, "optimizer state": 2_000, "buffers": 0, "batch": 64},
        "memory_bytes": 90_000,
        "compile_seconds": 2.5,
        "bound_notes": ("one all-reduce of the gradients", "stage 3 gathers"),
    }
    return Inspection(**{**values, **changes})
