"""Published runs with their plans, and random plans whose programs are compiled."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from jaxdist.planner.formulas.decoder import plan_refusal
from jaxdist.planner.model import Decoder
from jaxdist.planner.plan import KEPT, Plan, Schedule
from jaxdist.planner.target import parse_target


@dataclass(frozen=True)
class Published:
    """A published run of MaxText, and its plan.

    Attributes:
      name, model, topology, plan: the model, the chips and the plan of the run.
      mfu: the published MFU.
      source: the place of publication.
      whole: whether this MFU counts all products of attention, instead of the half that the mask
        keeps.
      slices: the number of TPU slices.
    """

    name: str
    model: Decoder
    topology: str
    plan: Plan
    mfu: float
    source: str
    whole: bool = True
    slices: int = 1


def _maxtext(layers: int, embed: int, heads: int, mlp: int, batch: int) -> Decoder:
    """Return a model of MaxText's own family: vocabulary of 32,000, windows of 2048, heads of 128.

    The scripts of these runs leave libtpu's limit of vector memory at its default.
    """
    return Decoder(
        layers, embed, heads, heads, 128, mlp, vocab=32000, window=2048, batch=batch, tied=False,
        scoped=False,
    )  # fmt: skip


def _16b(batch: int) -> Decoder:
    return _maxtext(32, 4096, 64, 28672, batch)


def _32b(batch: int) -> Decoder:
    return _maxtext(32, 8192, 64, 28672, batch)


def _64b(batch: int) -> Decoder:
    return _maxtext(64, 8192, 64, 28672, batch)


def _128b(batch: int) -> Decoder:
    return _maxtext(64, 8192, 128, 57344, batch)


def llama_70b(batch: int) -> Decoder:
    """Return Llama-2 70B (arXiv 2307.09288)."""
    return Decoder(80, 8192, 64, 8, 128, 28672, vocab=32000, window=4096, batch=batch, tied=False)


def llama_7b(batch: int) -> Decoder:
    """Return Llama-2 7B (arXiv 2307.09288)."""
    return Decoder(32, 4096, 32, 32, 128, 11008, vocab=32000, window=4096, batch=batch, tied=False)


def _llama_3(layers: int, embed: int, heads: int, mlp: int, batch: int) -> Decoder:
    """Return a size of Llama-3.1 (arXiv 2407.21783)."""
    return Decoder(
        layers, embed, heads, 8, 128, mlp, vocab=128256, window=8192, batch=batch, tied=False
    )


def _llama_3_8b(batch: int) -> Decoder:
    return _llama_3(32, 4096, 32, 14336, batch)


def _llama_3_70b(batch: int) -> Decoder:
    return _llama_3(80, 8192, 64, 28672, batch)


def _llama_3_405b(batch: int) -> Decoder:
    return _llama_3(126, 16384, 128, 53248, batch)


def _mistral_7b(batch: int) -> Decoder:
    return replace(_llama_3_8b(batch), vocab=32000)


def _recipe(name: str, model: Decoder, topology: str, remat: str, step_seconds: float) -> Published:
    """Return a run of Google's recipes, with ZeRO 3 on all chips; its step time gives the MFU."""
    target = parse_target(topology)
    peak = target.device.flops_per_second["bfloat16"] * target.devices
    return Published(
        name, model, topology, Plan(data=target.devices, remat=remat),
        model.model_flops(masked=True) / (peak * step_seconds), RECIPES,
    )  # fmt: skip


V5E, V5P = "MaxText, configs/v5e", "MaxText, configs/v5p"
MODELS = "MaxText, tiering of optimized models (512 chips); 4 sequences a chip, configs/v5p"
RECIPES = "AI-Hypercomputer/tpu-recipes, training"
EXCEPT_MLP = "save_dots_except_mlp"
PUBLISHED = (
    Published("16B", _16b(1536), "v5e:16x16", Plan(data=256), 0.611, V5E),
    Published("32B", _32b(1024), "v5e:16x16", Plan(data=256), 0.669, V5E),
    Published("64B", _64b(512), "v5e:16x16", Plan(data=256), 0.599, V5E),
    Published(
        "32B", _32b(384), "v5p:4x4x4", Plan(data=16, tensor=4, remat="minimal"), 0.715, V5P
    ),
    Published(
        "128B", _128b(128), "v5p:4x4x8", Plan(data=16, tensor=8, remat="minimal"), 0.687, V5P
    ),
    Published(
        "128B", _128b(256), "v5p:4x8x8", Plan(data=32, tensor=8, remat="minimal"), 0.688, V5P
    ),
    Published(
        "256B", _maxtext(64, 16384, 128, 57344, 512), "v5p:8x8x8",
        Plan(data=64, tensor=8, remat="minimal"), 0.671, V5P,
    ),
    Published(
        "512B", _maxtext(128, 16384, 128, 57344, 1024), "v5p:8x8x8", Plan(data=64, tensor=8),
        0.640, V5P,
    ),
    Published(
        "1024B", _maxtext(128, 16384, 256, 114688, 2048), "v5p:8x8x16", Plan(data=64, tensor=16),
        0.554, V5P,
    ),
    Published(
        "1024B", _maxtext(128, 16384, 256, 114688, 4096), "v5p:8x16x16",
        Plan(data=128, tensor=16), 0.648, V5P,
    ),
    Published(
        "Llama-2-70B", replace(llama_70b(2048), scoped=False), "v5p:8x8x8",
        Plan(data=512, remat=EXCEPT_MLP), 0.654, MODELS,
    ),
    _recipe("Llama-2-70B", llama_70b(512), "v6e:16x16", "save_qkv", 9.052),
    _recipe("Llama-3.1-8B", _llama_3_8b(1024), "v6e:16x16", EXCEPT_MLP, 4.546),
    _recipe("Llama-3.1-8B", _llama_3_8b(96), "v6e:4x8", EXCEPT_MLP, 3.495),
    _recipe("Llama-3.1-8B", _llama_3_8b(48), "v6e:4x4", EXCEPT_MLP, 3.393),
    _recipe("Llama-3.1-8B", _llama_3_8b(24), "v6e:2x4", EXCEPT_MLP, 3.443),
    _recipe("Mistral-7B", _mistral_7b(48), "v6e:2x4", EXCEPT_MLP, 6.320),
    _recipe("Llama-3.1-70B", _llama_3_70b(1280), "v6e:16x16", "save_qkv", 42.656),
    _recipe("Llama-3.1-70B", _llama_3_70b(512), "v6e:8x16", "save_qkv", 34.786),
    _recipe("Llama-3.1-70B", _llama_3_70b(128), "v6e:8x8", "save_qkv", 18.688),
    _recipe("Llama-3.1-70B", _llama_3_70b(64), "v6e:4x8", "save_qkv", 17.790),
    _recipe("Llama-3.1-405B", _llama_3_405b(1024), "v5p:8x8x8", "save_attention", 131.474),
    _recipe("Llama-3.1-70B", _llama_3_70b(256), "tpu7x:4x4x4", "save_qkv", 12.20),
    _recipe("Llama-3.1-70B", _llama_3_70b(1024), "tpu7x:4x8x8", "save_qkv", 12.27),
    _recipe("Llama-3.1-405B", _llama_3_405b(1536), "tpu7x:4x8x8", "full", 98.34),
)  # fmt: skip
"""The runs whose whole plan is published, and possible in jaxdist; other runs lack the remat, the
batch or the number of chips. Models of configs/v5e and v5p follow MaxText's scaling rule. Recipes
offload some activations to the host: the plan here keeps them on the device. It recomputes the same
activations as the run, but takes more memory."""

SMALL = {
    "0.6B": Decoder(8, 2048, 16, 8, 128, 5632, vocab=32000, window=2048, batch=1, tied=False),
    "0.3B": Decoder(16, 1024, 8, 8, 128, 4096, vocab=32000, window=1024, batch=1, tied=False),
    "1.1B": Decoder(4, 4096, 32, 32, 128, 11008, vocab=32000, window=2048, batch=1, tied=False),
}
"""The models for which plans are drawn; each draw has its own batch."""
TOPOLOGIES = {"v5e:2x4": 8, "v5p:2x2x2": 8, "v6e:2x4": 8}


@dataclass(frozen=True)
class Drawn:
    """A random plan to compile.

    Attributes:
      model: a key of `SMALL`.
      topology: a key of `TOPOLOGIES`.
      batch: the rows of the batch.
      plan: the plan.
    """

    model: str
    topology: str
    batch: int
    plan: Plan

    def settings(self) -> list[str]:
        """Return the settings of the model and the batch, over `benchmarks/tpu/llama.yaml`."""
        of = SMALL[self.model]
        return [
            f"model.layers={of.layers}",
            f"model.embed={of.embed}",
            f"model.heads={of.heads}",
            f"model.kv_heads={of.kv_heads}",
            f"model.mlp={of.mlp}",
            f"data.window={of.window}",
            f"train.batch_size={self.batch}",
        ]


def drawn(seed: int) -> Iterator[Drawn]:
    """Yield valid random plans without end, which depend only on the seed."""
    rng = random.Random(seed)
    while True:
        one = _draw(rng)
        if plan_refusal(decoder(one), one.plan) is None:
            yield one


def decoder(one: Drawn) -> Decoder:
    """Return the model of a draw, with its batch."""
    return replace(SMALL[one.model], batch=one.batch)


def _draw(rng: random.Random) -> Drawn:
    model, topology = rng.choice(list(SMALL)), rng.choice(list(TOPOLOGIES))
    devices = TOPOLOGIES[topology]
    stage = rng.choice([1, 1, 1, 1, 2, 4])
    tensor = rng.choice([n for n in (1, 1, 2, 4) if n * stage <= devices])
    data = devices // stage // tensor
    zero = rng.choice([0, 1, 2, 3, 3, 3]) if stage == 1 else rng.choice([0, 1])
    remat = rng.choice(list(KEPT))
    schedule: Schedule | None = None
    chunks = 1
    if stage > 1:
        microbatches = rng.choice([stage, 2 * stage])
        schedule = rng.choice(_SCHEDULES)
        if schedule == "interleaved":
            chunks = 2
            if 2 * stage > SMALL[model].layers:
                schedule, chunks = "1f1b", 1
    else:
        microbatches = rng.choice([1, 1, 2, 4])
    narrow = rng.random() < 0.25
    rows = rng.choice([1, 2, 4])
    plan = Plan(
        data=data,
        tensor=tensor,
        stage=stage,
        zero=zero,
        remat=remat,
        microbatches=microbatches,
        schedule=schedule,
        chunks=chunks,
        bfloat16_reduction=narrow,
    )
    return Drawn(model, topology, rows * microbatches * data, plan)


_SCHEDULES: tuple[Schedule, ...] = ("1f1b", "interleaved", "zb_h1")
