"""A program with torch's side of `benchmarks.pipeline.race`: jaxdist's GPT in stages.

`python peer KIND RANK WORLD DIRECTORY SIZES` joins WORLD processes over gloo and runs a schedule of
torch.distributed.pipelining. With KIND "alone" it joins no other process, and computes the
microbatches one after another. It starts from DIRECTORY/weights.npz and trains on
DIRECTORY/tokens.npy. It answers as
`benchmarks.zero.ours` does, each process with its share of the loss times WORLD, so that the mean
over processes is the loss. SIZES is JSON: layers, embed, heads, mlp, vocab, microbatches, and
chunks of a stage. It imports torch, and of this package only the model and optimizer of
`benchmarks/zero/torch_peer`.

Dims: B batch, L sequence, D embed, V vocab.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch  # pyright: ignore[reportMissingImports]  (an extra)
import torch.distributed as dist  # pyright: ignore[reportMissingImports]  (an extra)
import torch.nn.functional as nnf  # pyright: ignore[reportMissingImports]  (an extra)
from torch import Tensor, nn  # pyright: ignore[reportMissingImports]  (an extra)
from torch.distributed import (  # pyright: ignore[reportMissingImports]  (an extra)
    pipelining,
)

SCHEDULES = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
}
Step = Callable[[], Tensor]


def _gpt_program() -> Any:
    # Loaded by its path, since this program runs without the package `benchmarks`.
    path = Path(__file__).parents[2] / "zero" / "torch_peer" / "__main__.py"
    spec = importlib.util.spec_from_file_location("zero_torch_program", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


GPT = _gpt_program()


class Chunk(nn.Module):
    """Consecutive blocks of the model.

    The first chunk begins with the embedding, and the last ends with the logits, tied to it.
    """

    embedding: nn.Parameter
    norm: nn.Module

    def __init__(self, model: Any, index: int, chunks: int):
        super().__init__()
        each = len(model.blocks) // chunks
        self.is_first, self.is_last = index == 0, index == chunks - 1
        self.blocks = nn.ModuleList(model.blocks[index * each : (index + 1) * each])
        if self.is_first or self.is_last:
            self.embedding = model.embedding
        if self.is_last:
            self.norm = model.norm

    def forward(self, x: Tensor) -> Tensor:
        x_BLD = nnf.embedding(x, self.embedding) if self.is_first else x
        for block in self.blocks:
            x_BLD = block(x_BLD)
        return nnf.linear(self.norm(x_BLD), self.embedding) if self.is_last else x_BLD


def mean_loss(logits_BLV: Tensor, targets_BL: Tensor) -> Tensor:
    """Return the mean cross-entropy."""
    return nnf.cross_entropy(logits_BLV.flatten(0, 1), targets_BL.flatten())


def alone(model: nn.Module, tokens: Tensor, microbatches: int) -> Step:
    """Return a function that computes the gradients by microbatches, and returns the loss."""

    def step() -> Tensor:
        total = torch.zeros(())
        for rows in tokens.chunk(microbatches):
            loss = mean_loss(model(rows[:, :-1]), rows[:, 1:]) / microbatches
            loss.backward()
            total += loss.detach()
        return total

    return step


def in_stages(
    kind: str, model: Any, chunks: int, tokens: Tensor, microbatches: int
) -> tuple[nn.ModuleList, Step]:
    """Return this process's chunks, and a function that computes their gradients by a schedule.

    The function returns WORLD times this process's share of the loss.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    places = range(rank, world * chunks, world)
    own = nn.ModuleList(Chunk(model, place, world * chunks) for place in places)
    here = torch.device("cpu")
    stages = [
        pipelining.PipelineStage(part, place, world * chunks, here)
        for part, place in zip(own, places, strict=True)
    ]
    make = getattr(pipelining, SCHEDULES[kind])
    schedule = make(stages if kind == "interleaved" else stages[0], microbatches, loss_fn=mean_loss)
    table, is_last = model.embedding, rank == world - 1
    inputs = (tokens[:, :-1].contiguous(),) if rank == 0 else ()
    targets = tokens[:, 1:].contiguous() if is_last else None

    def step() -> Tensor:
        losses: list[Tensor] = []
        # By default the last stage would also concatenate the logits of all microbatches.
        schedule.step(*inputs, target=targets, losses=losses, return_outputs=False)
        if rank == 0 or is_last:
            dist.all_reduce(table.grad)  # of embedding on the first stage, and logits on the last
        return world * torch.stack(losses).mean() if is_last else torch.zeros(())

    return own, step


def build(kind: str, sizes: dict[str, int], directory: Path) -> Step:
    """Return a train step of this process."""
    microbatches, chunks = sizes.pop("microbatches"), sizes.pop("chunks")
    model = GPT.Gpt(**sizes)
    with np.load(directory / "weights.npz") as found:
        model.load_state_dict({name: torch.tensor(value) for name, value in found.items()})
    tokens = torch.tensor(np.load(directory / "tokens.npy"), dtype=torch.int64)
    own, gradients = model, alone(model, tokens, microbatches)
    if kind != "alone":
        held = chunks if kind == "interleaved" else 1
        own, gradients = in_stages(kind, model, held, tokens, microbatches)
    optimizer = torch.optim.AdamW(
        own.parameters(), lr=GPT.LEARNING_RATE, weight_decay=0.0, fused=True
    )

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = gradients()
        optimizer.step()
        return loss

    return step


def serve(kind: str, directory: Path, sizes: dict[str, int], answers: TextIO) -> None:
    """Take steps on request, each with the same batch."""
    step = build(kind, sizes, directory)
    with np.load(directory / "weights.npz") as found:
        params = sum(value.size for value in found.values())
    GPT.answer(step, params, answers)


def main(kind: str, rank: int, world: int, directory: Path, sizes: str) -> None:
    """Join the other processes, and take steps on request."""
    with GPT.joined(kind, rank, world, directory) as answers:
        serve(kind, directory, json.loads(sizes), answers)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]), sys.argv[5])
