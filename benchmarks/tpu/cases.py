"""The train steps that `jaxdist bench tpu` compiles, with their goals and published results."""

from __future__ import annotations

from dataclasses import dataclass

LLAMA_7B = "model.layers=32 model.embed=4096 model.heads=32 model.kv_heads=32 model.mlp=11008"
"""The settings of Llama-2-7B (arXiv 2307.09288), except its vocabulary, which the config has."""
# MaxText's own models scale a base of 16 layers, width 2048, 16 heads of 128 and mlp 7168 by
# `global_parameter_scale` (configs/v5e/*.sh, configs/v5p/*.sh).
SCALE_16B = (
    "model.layers=32 model.embed=4096 model.heads=64 model.kv_heads=64 model.head_size=128 "
    "model.mlp=28672"
)
SCALE_32B = "model.layers=32 model.embed=8192 model.heads=64 model.kv_heads=64 model.mlp=28672"
SCALE_64B = "model.layers=64 model.embed=8192 model.heads=64 model.kv_heads=64 model.mlp=28672"
SCALE_128B = (
    "model.layers=64 model.embed=8192 model.heads=128 model.kv_heads=128 model.head_size=128 "
    "model.mlp=57344"
)
TENSOR = "sharding={rules: {residual_seq: tensor}, collective_matmul: true}"
STAGES = (
    "mesh={stage: 8, data: 8, tensor: 8}", TENSOR, "train.microbatches=64",
    "parallel={zero: {stage: 1}, pipeline: {schedule: {type: 1f1b}, ahead: true}}",
)  # fmt: skip
"""The plan of `benchmarks/pipeline/pod.yaml`."""
ALL_BUT_NONLINEAR = (
    "model.remat={query: save, key: save, value: save, attention: save, attention_out: save, "
    "mlp_gate: save, mlp_up: save}"
)


@dataclass(frozen=True)
class Case:
    """A train step to compile.

    Attributes:
      name: the model and the plan.
      topology: the TPUs.
      settings: overrides of `llama.yaml`.
      most_seconds: the goal for the seconds of the step, or None.
      least_mfu: the goal for the MFU that counts causal attention half, or None.
      published_mfu: the MFU that MaxText measured on these chips, or None.
      most_peak_gb: the goal for the peak memory, or None.
    """

    name: str
    topology: str
    settings: tuple[str, ...] = ()
    most_seconds: float | None = None
    least_mfu: float | None = None
    published_mfu: float | None = None
    most_peak_gb: float | None = None


def _case(name: str, topology: str, *settings: str, **goals: float) -> Case:
    split = [word for setting in settings for word in _words(setting)]
    return Case(name, topology, tuple(split), **goals)


def _words(setting: str) -> list[str]:
    return [setting] if "{" in setting else setting.split()


CASES = (
    _case(
        "70B, ZeRO 3, full remat", "v5p:4x4x4", "model.remat=full",
        most_seconds=24.0, most_peak_gb=48.7,
    ),
    _case(
        "70B, ZeRO 3, save_dots_except_mlp", "v5p:4x4x4", "model.remat=save_dots_except_mlp",
        most_seconds=23.0, published_mfu=0.654,
    ),
    _case(
        "7B, ZeRO 3, attention saved", "v5e:4x4", LLAMA_7B, "train.batch_size=32",
        "model.remat=save_attention", least_mfu=0.6,
    ),
    _case(
        "7B, ZeRO 3, all named saved", "v5p:2x2x2", LLAMA_7B, "train.batch_size=32",
        ALL_BUT_NONLINEAR, least_mfu=0.6,
    ),
    _case("7B, ZeRO 3, full remat", "v5p:2x2x2", LLAMA_7B, "train.batch_size=32"),
    _case(
        "16B, ZeRO 3, full remat", "v5e:16x16", SCALE_16B, "data.window=2048",
        "train.batch_size=1536", published_mfu=0.611,
    ),
    _case(
        "32B, ZeRO 3, full remat", "v5e:16x16", SCALE_32B, "data.window=2048",
        "train.batch_size=1024", published_mfu=0.6686,
    ),
    _case(
        "64B, ZeRO 3, full remat", "v5e:16x16", SCALE_64B, "data.window=2048",
        "train.batch_size=512", published_mfu=0.599,
    ),
    _case(
        "32B, ZeRO 3 x tensor 4, minimal", "v5p:4x4x4", SCALE_32B, "data.window=2048",
        "train.batch_size=384", "mesh={data: 16, tensor: 4}", TENSOR, "model.remat=minimal",
        published_mfu=0.715,
    ),
    _case(
        "128B, ZeRO 3 x tensor 8, minimal", "v5p:4x4x8", SCALE_128B, "data.window=2048",
        "train.batch_size=128", "mesh={data: 16, tensor: 8}", TENSOR, "model.remat=minimal",
        published_mfu=0.687,
    ),
    _case("70B, ZeRO 3", "v5p:8x8x8", "train.batch_size=1024"),
    _case(
        "70B, ZeRO 3 x tensor 8", "v5p:8x8x8", "train.batch_size=1024",
        "mesh={data: 64, tensor: 8}", TENSOR,
    ),
    _case("70B, 1F1B x ZeRO 1 x tensor 8", "v5p:8x8x8", "train.batch_size=1024", *STAGES),
    _case(
        "70B, 1F1B x ZeRO 1 x tensor 8, stash", "v5p:8x8x8", "train.batch_size=1024", *STAGES,
        "parallel.pipeline.activations=stash",
    ),
)  # fmt: skip
"""The steps to compile. Published MFUs are from the README files of MaxText's configs for v5e and
v5p; the MFU of 70B is from MaxText's table of models for v5p."""
