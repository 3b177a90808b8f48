"""A program with torch's side of `benchmarks.zero.race`: jaxdist's GPT under DDP or FSDP2.

`python torch_peer KIND RANK WORLD DIRECTORY SIZES` joins WORLD processes over gloo, or none with
KIND "alone". It starts from DIRECTORY/weights.npz and trains on its rows of DIRECTORY/tokens.npy.
It answers as `ours.py` does. SIZES is JSON: layers, embed, heads, mlp, vocab, and the batch of one
process. It imports torch and nothing of jaxdist.

Dims: B batch, L sequence, D embed, H heads, d head_dim, F mlp, V vocab.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

import numpy as np
import torch  # pyright: ignore[reportMissingImports]  (an extra)
import torch.distributed as dist  # pyright: ignore[reportMissingImports]  (an extra)
import torch.nn.functional as nnf  # pyright: ignore[reportMissingImports]  (an extra)
from torch import Tensor, nn  # pyright: ignore[reportMissingImports]  (an extra)

LEARNING_RATE = 1e-3


class Attention(nn.Module):
    def __init__(self, embed: int, heads: int):
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (
            nn.Linear(embed, embed, bias=False) for _ in range(4)
        )

    def forward(self, x_BLD: Tensor) -> Tensor:
        B, L, D = x_BLD.shape
        q, k, v = (
            layer(x_BLD).view(B, L, self.heads, -1).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        y_BHLd = nnf.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
        return self.out(y_BHLd.transpose(1, 2).reshape(B, L, D))


def rotate(x_BHLd: Tensor) -> Tensor:
    """Apply rotary positions, which pair the two halves of the features."""
    length, half = x_BHLd.shape[2], x_BHLd.shape[-1] // 2
    frequency = 1e4 ** (-torch.arange(half, dtype=torch.float32) / half)
    angle = torch.arange(length, dtype=torch.float32)[:, None] * frequency
    cos, sin = angle.cos(), angle.sin()
    a, b = x_BHLd.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Block(nn.Module):
    def __init__(self, embed: int, heads: int, mlp: int):
        super().__init__()
        self.attention_norm, self.mlp_norm = (nn.RMSNorm(embed, eps=1e-6) for _ in range(2))
        self.attention = Attention(embed, heads)
        self.gate, self.up = (nn.Linear(embed, mlp, bias=False) for _ in range(2))
        self.down = nn.Linear(mlp, embed, bias=False)

    def forward(self, x_BLD: Tensor) -> Tensor:
        x_BLD = x_BLD + self.attention(self.attention_norm(x_BLD))
        h_BLD = self.mlp_norm(x_BLD)
        return x_BLD + self.down(nnf.silu(self.gate(h_BLD)) * self.up(h_BLD))


class Gpt(nn.Module):
    """The model of `jaxdist.models.gpt` at its defaults, the head tied to the embedding."""

    def __init__(self, layers: int, embed: int, heads: int, mlp: int, vocab: int):
        super().__init__()
        self.embedding = nn.Parameter(0.02 * torch.randn(vocab, embed))
        self.blocks = nn.ModuleList(Block(embed, heads, mlp) for _ in range(layers))
        self.norm = nn.RMSNorm(embed, eps=1e-6)

    def forward(self, tokens_BL: Tensor) -> Tensor:
        x_BLD = nnf.embedding(tokens_BL, self.embedding)
        for block in self.blocks:
            x_BLD = block(x_BLD)
        return nnf.linear(self.norm(x_BLD), self.embedding)


def next_token_loss(model: Callable[[Tensor], Tensor], tokens: Tensor) -> Tensor:
    """Return the mean cross-entropy of tokens `[B, L + 1]`."""
    logits = model(tokens[:, :-1])
    return nnf.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def wrap(model: Gpt, kind: str) -> nn.Module:
    """Return the model under DDP, under FSDP2 by block, or unchanged.

    Blocks stay gathered from the forward pass to the backward pass, as in jaxdist without remat, so
    that both sides send the same bytes.
    """
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if kind == "fsdp":
        from torch.distributed.fsdp import (  # pyright: ignore[reportMissingImports]  (an extra)
            fully_shard,
        )

        for block in model.blocks:
            fully_shard(block, reshard_after_forward=False)
        fully_shard(model, reshard_after_forward=False)
    return model


def build(kind: str, sizes: dict[str, int], weights: Path) -> tuple[nn.Module, torch.optim.AdamW]:
    """Return the wrapped model with these weights, and its optimizer in torch's fastest form."""
    model = Gpt(**sizes)
    with np.load(weights) as found:
        model.load_state_dict({name: torch.tensor(value) for name, value in found.items()})
    wrapped = wrap(model, kind)
    return wrapped, torch.optim.AdamW(
        wrapped.parameters(), lr=LEARNING_RATE, weight_decay=0.0, fused=True
    )


def step(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor) -> Tensor:
    """Make one update, and return the loss before it."""
    optimizer.zero_grad()
    loss = next_token_loss(model, tokens)
    loss.backward()
    optimizer.step()
    return loss.detach()


def serve(kind: str, rank: int, directory: Path, sizes: dict[str, int], answers: TextIO) -> None:
    """Take steps on request, each with the same rows."""
    batch = sizes.pop("batch")
    model, optimizer = build(kind, sizes, directory / "weights.npz")
    rows = np.load(directory / "tokens.npy")[rank * batch : (rank + 1) * batch]
    tokens = torch.tensor(rows, dtype=torch.int64)
    params = sum(param.numel() for param in model.parameters())
    answer(lambda: step(model, optimizer, tokens), params, answers)


def answer(step: Callable[[], Tensor], params: int, answers: TextIO) -> None:
    """Report that this process is ready; for each line N of the input, take N steps."""
    hello = {"params": params, "cores": sorted(os.sched_getaffinity(0))}
    print(json.dumps(hello), file=answers, flush=True)
    for line in sys.stdin:
        loss = torch.zeros(())
        begun = time.perf_counter()
        for _ in range(int(line)):
            loss = step()
        found = {"seconds": time.perf_counter() - begun, "loss": loss.item()}
        print(json.dumps(found), file=answers, flush=True)


@contextmanager
def joined(kind: str, rank: int, world: int, directory: Path) -> Iterator[TextIO]:
    """Join the other processes, with one thread, and yield a file for the answers."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # gloo prints to standard output, which must have nothing but answers
    torch.set_num_threads(1)
    if kind != "alone":
        store = f"file://{directory / kind}"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world)
    yield answers
    if kind != "alone":
        dist.destroy_process_group()


def main(kind: str, rank: int, world: int, directory: Path, sizes: str) -> None:
    """Join the other processes, and take steps on request."""
    with joined(kind, rank, world, directory) as answers:
        serve(kind, rank, directory, json.loads(sizes), answers)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]), sys.argv[5])
