"""The bench `jaxdist bench gpu`: training on one GPU, against PyTorch and against the plan.

Dims: B batch, L sequence, H heads, d head_dim.
"""

from __future__ import annotations

import importlib
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.core.harness import REPEATS, interleave
from benchmarks.core.report import Figure, Report, lacking
from jaxdist.experiment import Experiment, build, load
from jaxdist.models.attention.choose import KERNELS
from jaxdist.models.attention.contract import Qkv
from jaxdist.models.hints import no_hint
from jaxdist.planner.model import Decoder
from jaxdist.planner.plan import Plan
from jaxdist.planner.search import Judged, judge_plan, model_of
from jaxdist.planner.target import meshes, parse_target
from jaxdist.runtime.hardware import find_device

CONFIG = Path(__file__).parents[1] / "configs/gpt/base.yaml"
STEP_GOAL, KERNEL_GOAL, TIME_GOAL, MEMORY_GOAL = "<= 1.05", "<= 1.1", "<= 1.25", "<= 1.15"
MOST_APART = 0.02
STEPS = 4
"""The number of steps in a sample, enough that the queue of a device is never empty."""
PEER = "transformers' Llama of these sizes: torch.compile, sdpa, autocast to bfloat16, fused AdamW"
TOKENS = ("data.type=synthetic", "data.kind=tokens", "data.heldout_examples=0")


@dataclass(frozen=True)
class Case:
    """A language model to train on one GPU.

    Attributes:
      settings: overrides of configs/gpt/base.yaml.
      remat: the remat policy, as the planner names it.
    """

    name: str
    settings: tuple[str, ...]
    remat: str

    @property
    def plan(self) -> Plan:
        """The plan on one device, which keeps whole parameters and their state."""
        return Plan(zero=0, remat=self.remat)

    def overrides(self) -> list[str]:
        """Return the settings of the model and of the plan, as overrides."""
        planned = self.plan.settings()
        keys = ("mesh", "train.microbatches", "model.remat")
        return [*TOKENS, *self.settings, *(f"{key}={json.dumps(planned[key])}" for key in keys)]


CASES = (
    Case("85M", ("data.window=1024", "train.batch_size=64"), "all_named"),
    Case(
        "1.2B",
        (
            "data.window=2048",
            "data.vocab_size=32000",
            "train.batch_size=8",
            "model.layers=16",
            "model.embed=2048",
            "model.heads=32",
            "model.kv_heads=8",
            "model.mlp=8192",
            "loss.type=next_token",
            "loss.chunks=4",
        ),
        "all_named",
    ),
)
LENGTHS = (1024, 4096, 16384)
TOKENS_OF_KERNELS, HEADS, FEATURES = 16384, 16, 128


def bench(repeats: int = REPEATS, peer: bool = True) -> Report:
    """Time the steps of two language models and the kernel of attention, on one GPU.

    Args:
      peer: whether PyTorch is measured too, if it is installed.
    """
    device = jax.devices()[0]
    if device.platform != "gpu":
        return Report("gpu", [Figure.skipped("steps", f"the device is a {device.platform}")])
    reason = "" if peer else "peer=false"
    reason = reason or lacking("torch") or _no_transformers()
    figures: list[Figure] = []
    for case in CASES:
        print(f"{case.name}: both compilers take a minute or more", file=sys.stderr)
        figures += step_figures(case, repeats, reason)
    if reason:
        return Report("gpu", [*figures, Figure.skipped("kernels", reason)])
    return Report("gpu", [*(kernel_figure(length, repeats) for length in LENGTHS), *figures])


def _no_transformers() -> str:
    try:
        importlib.import_module("transformers")
    except ImportError as error:
        return f"transformers cannot be imported: {error}"
    return ""


def step_figures(case: Case, repeats: int, without_peer: str) -> list[Figure]:
    """Compare a step's time with PyTorch and with the plan, and its memory with the plan."""
    document, config = load(CONFIG, case.overrides())
    model = model_of(config, document)
    assert isinstance(model, Decoder), "the config's model is a gpt"
    ours = trainer(build(config, document, devices=jax.devices()[:1]))
    name = f"{case.name} step over PyTorch's"
    if without_peer:
        sample, _ = interleave(ours, lambda: None, repeats=repeats)
        figures = [Figure.skipped(name, without_peer)]
    else:
        sample, other = interleave(ours, torch_trainer(model), repeats=repeats)
        figures = [Figure.compare(name, sample / STEPS, other / STEPS, STEP_GOAL, PEER)]
    known = find_device(jax.devices()[0].device_kind)
    if known is None:
        return [*figures, Figure.skipped(f"{case.name} plan", "the planner has no such GPU")]
    judged = planned(case, model, known.name)
    seconds = sample.median / STEPS
    peak_flops = seconds * known.flops_per_second["bfloat16"]
    share = model.model_flops(masked=False) / peak_flops
    note = (
        f"{model.tokens:,} tokens a step; {model.tokens / seconds:,.0f} a second, MFU {share:.1%}"
    )
    peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", math.nan)
    counted = "as jax counts it since the process began, so the largest until now"
    plan_seconds, plan_bytes = judged.seconds.total, judged.memory.total
    return [
        *figures,
        Figure(f"{case.name} step over the plan's", seconds, plan_seconds, TIME_GOAL, "s", note),
        Figure(f"{case.name} memory over the plan's", peak, plan_bytes, MEMORY_GOAL, "B", counted),
    ]


def trainer(experiment: Experiment) -> Callable[[], object]:
    """Return a function that trains an experiment for `STEPS` steps on one batch, and waits."""
    program, state = experiment.program, experiment.program.init()
    with experiment.loader.batches() as batches:
        batch = next(batches)

    def steps() -> None:
        nonlocal state
        metrics: object = None
        for _ in range(STEPS):
            state, metrics = program.train(state, batch)
        jax.block_until_ready(metrics)

    return steps


def planned(case: Case, model: Decoder, gpu: str) -> Judged:
    """Return the plan of a case on a GPU, with its memory and time by formula."""
    target = parse_target(f"{gpu}:1x1")
    return judge_plan(model, case.plan, next(meshes(target)), target)


def torch_trainer(model: Decoder) -> Callable[[], object]:
    """Return a function that trains transformers' Llama of these sizes, and waits for the GPU."""
    # These packages are optional, and torch takes seconds to import.
    import torch  # pyright: ignore[reportMissingImports]
    import transformers  # pyright: ignore[reportMissingImports]

    config = transformers.LlamaConfig(
        vocab_size=model.vocab,
        hidden_size=model.embed,
        intermediate_size=model.mlp,
        num_hidden_layers=model.layers,
        num_attention_heads=model.heads,
        num_key_value_heads=model.kv_heads,
        max_position_embeddings=model.window,
        tie_word_embeddings=model.tied,
        attn_implementation="sdpa",
        use_cache=False,
    )
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    network: Any = transformers.LlamaForCausalLM(config).cuda()
    compiled = torch.compile(network)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4, betas=(0.9, 0.95), fused=True)
    tokens = torch.randint(model.vocab, (model.batch, model.window), device="cuda")

    def steps() -> None:
        for _ in range(STEPS):
            with torch.autocast("cuda", torch.bfloat16):
                loss = compiled(input_ids=tokens, labels=tokens).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()

    return steps


def kernel_figure(length: int, repeats: int) -> Figure:
    """Compare the gradients of causal attention: cuDNN through jaxdist, and PyTorch's kernel."""
    import torch  # pyright: ignore[reportMissingImports]

    shape = (TOKENS_OF_KERNELS // length, length, HEADS, FEATURES)
    keys = jax.random.split(jax.random.key(0), 3)
    given = [jax.random.normal(key, shape, jnp.bfloat16) for key in keys]
    fused, plain = gradient("cudnn"), gradient("plain")
    if length == LENGTHS[0]:  # plain keeps all scores, which fit at the shortest length only
        check_equal(fused(*given), plain(*given))
    tensors = [
        torch.randn(shape, device="cuda", dtype=torch.bfloat16).transpose(1, 2).requires_grad_()
        for _ in range(3)
    ]

    def reference() -> None:
        for _ in range(STEPS):
            attend = torch.nn.functional.scaled_dot_product_attention
            attend(*tensors, is_causal=True).square().sum().backward()
            for tensor in tensors:
                tensor.grad = None
        torch.cuda.synchronize()

    def ours() -> None:
        results: object = None
        for _ in range(STEPS):
            results = fused(*given)
        jax.block_until_ready(results)

    ours_sample, other = interleave(ours, reference, repeats=repeats)
    return Figure.compare(
        f"attention, {length}",
        ours_sample / STEPS,
        other / STEPS,
        KERNEL_GOAL,
        f"gradients, bfloat16 {list(shape)}; scaled_dot_product_attention of PyTorch",
    )


def gradient(name: str) -> Callable[..., tuple[jax.Array, ...]]:
    """Return a jitted gradient of the sum of squared results by query, key and value."""

    def total(*qkv: jax.Array) -> jax.Array:
        out_BLHd = KERNELS[name](Qkv(*qkv), window=None, causal=True, hint=no_hint)
        return jnp.square(out_BLHd.astype(jnp.float32)).sum()

    return jax.jit(jax.grad(total, argnums=(0, 1, 2)))


def check_equal(ours: Sequence[jax.Array], others: Sequence[jax.Array]) -> None:
    """Assert that gradients of two kernels agree as well as bfloat16 permits."""
    for one, other in zip(ours, others, strict=True):
        wide, reference = one.astype(jnp.float32), other.astype(jnp.float32)
        error = jnp.linalg.norm(wide - reference) / jnp.linalg.norm(reference)
        assert float(error) < MOST_APART, float(error)
