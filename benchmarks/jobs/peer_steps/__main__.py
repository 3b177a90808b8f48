"""A program with torch's side of `benchmarks.jobs.steps`: a process that takes steps on request.

`python benchmarks/jobs/peer_steps MODEL KIND BATCH` answers as `own_steps.py` does. MODEL is
ResNet-18, BERT-small or ViT-small, and KIND is eager or compiled. The program uses nothing of
jaxdist.

Dims: B batch, L sequence, D embed, P predicted positions.
"""

import json
import os
import sys
import time

import torch  # pyright: ignore[reportMissingImports]
import torch.nn.functional as nnf  # pyright: ignore[reportMissingImports]
from torch import nn  # pyright: ignore[reportMissingImports]

SIDE, CLASSES = 28, 10
WINDOW, PREDICTED, VOCAB, POSITIONS = 128, 19, 320, 512


class Attention(nn.Module):
    def __init__(self, embed, heads):
        super().__init__()
        self.heads = heads
        self.inputs, self.out = nn.Linear(embed, 3 * embed), nn.Linear(embed, embed)

    def forward(self, x_BLD):
        B, L, D = x_BLD.shape
        q, k, v = self.inputs(x_BLD).view(B, L, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = nnf.scaled_dot_product_attention(q, k, v)
        return self.out(y.transpose(1, 2).reshape(B, L, D))


class Block(nn.Module):
    """A block with norms before its two parts (ViT), or after their sums (BERT)."""

    def __init__(self, embed, heads, before):
        super().__init__()
        self.before = before
        self.attention = Attention(embed, heads)
        self.mlp = nn.Sequential(
            nn.Linear(embed, 4 * embed), nn.GELU(), nn.Linear(4 * embed, embed)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(embed) for _ in range(2))

    def forward(self, x_BLD):
        for norm, part in zip(self.norms, (self.attention, self.mlp), strict=True):
            x_BLD = x_BLD + part(norm(x_BLD)) if self.before else norm(x_BLD + part(x_BLD))
        return x_BLD


class Bert(nn.Module):
    def __init__(self, layers=4, embed=128, heads=4):
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, embed)
        self.positions = nn.Parameter(torch.zeros(POSITIONS, embed))
        self.kinds = nn.Parameter(torch.zeros(2, embed))
        self.first, self.norm = nn.LayerNorm(embed), nn.LayerNorm(embed)
        self.blocks = nn.Sequential(*(Block(embed, heads, False) for _ in range(layers)))
        self.transform = nn.Linear(embed, embed)
        self.bias = nn.Parameter(torch.zeros(VOCAB))

    def forward(self, tokens_BL, places_BP):
        x_BLD = self.tokens(tokens_BL) + self.positions[: tokens_BL.shape[1]] + self.kinds[:1]
        x_BLD = self.blocks(self.first(x_BLD))
        x_BPD = x_BLD.gather(1, places_BP[..., None].expand(-1, -1, x_BLD.shape[-1]))
        h_BPD = self.norm(nnf.gelu(self.transform(x_BPD)))
        return nnf.linear(h_BPD, self.tokens.weight, self.bias)


class Vit(nn.Module):
    def __init__(self, patch=4, layers=12, embed=384, heads=6):
        super().__init__()
        self.patches = nn.Conv2d(1, embed, patch, patch)
        self.positions = nn.Parameter(torch.zeros((SIDE // patch) ** 2, embed))
        self.blocks = nn.Sequential(*(Block(embed, heads, True) for _ in range(layers)))
        self.norm, self.out = nn.LayerNorm(embed), nn.Linear(embed, CLASSES)

    def forward(self, image):
        x_BLD = self.patches(image).flatten(2).transpose(1, 2) + self.positions
        return self.out(self.norm(self.blocks(x_BLD)).mean(1))


def convolution(inputs, outputs, window, stride):
    layer = nn.Conv2d(inputs, outputs, window, stride, window // 2, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(outputs))


class Residual(nn.Module):
    def __init__(self, inputs, outputs, stride):
        super().__init__()
        first, last = convolution(inputs, outputs, 3, stride), convolution(outputs, outputs, 3, 1)
        self.convolutions = nn.Sequential(first, nn.ReLU(), last)
        resized = stride > 1 or inputs != outputs
        self.rest = convolution(inputs, outputs, 1, stride) if resized else nn.Identity()

    def forward(self, x):
        return nnf.relu(self.convolutions(x) + self.rest(x))


def resnet18():
    parts, inputs = [convolution(1, 64, 3, 1), nn.ReLU()], 64
    for outputs in (64, 128, 256, 512):
        for stride in (1 if outputs == 64 else 2, 1):
            parts.append(Residual(inputs, outputs, stride))
            inputs = outputs
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, CLASSES))


def build(name, batch):
    """Return a model with its inputs, labels and optimizer."""
    if name == "BERT-small":
        model = Bert()
        places = torch.stack([torch.randperm(WINDOW)[:PREDICTED] for _ in range(batch)])
        inputs = torch.randint(256, (batch, WINDOW)), places
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        return model, inputs, torch.randint(256, (batch, PREDICTED)), optimizer
    model, image = (
        {"ResNet-18": resnet18, "ViT-small": Vit}[name](),
        torch.rand(batch, 1, SIDE, SIDE),
    )
    model = model.to(memory_format=torch.channels_last)
    given = {"momentum": 0.9, "nesterov": True, "weight_decay": 5e-4, "fused": True}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, **given)
    image = image.contiguous(memory_format=torch.channels_last)
    return model, (image,), torch.randint(CLASSES, (batch,)), optimizer


def main(name, kind, batch):
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # standard output must have nothing but answers
    torch.set_num_threads(1)
    model, inputs, labels, optimizer = build(name, int(batch))

    def loss_of():
        logits = model(*inputs)
        return nnf.cross_entropy(logits.flatten(0, -2), labels.flatten())

    run = torch.compile(loss_of) if kind == "compiled" else loss_of
    params = sum(each.numel() for each in model.parameters())
    hello = {"params": params, "cores": sorted(os.sched_getaffinity(0))}
    print(json.dumps(hello), file=answers, flush=True)
    for line in sys.stdin:
        begun, spent, loss = time.perf_counter(), time.process_time(), torch.zeros(())
        for _ in range(int(line)):
            optimizer.zero_grad()
            loss = run()
            loss.backward()
            optimizer.step()
        took = {"seconds": time.perf_counter() - begun, "cpu": time.process_time() - spent}
        print(json.dumps({**took, "loss": loss.item()}), file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
