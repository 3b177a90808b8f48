"""A program with torch's DDP over gloo on one host, the peer of `jaxdist bench compression --lab`.

`python peer WIDTHS ROWS RATE` joins the other hosts by the variables `JAX_COORDINATOR_ADDRESS`
(only its host; the port is `PORT`), `JAX_NUM_PROCESSES` and `JAX_PROCESS_ID`. It prints a line of
JSON when it is ready. For each line "KIND STEPS" on its input it takes STEPS steps, and prints the
seconds and the loss before the last step. It imports torch and nothing of jaxdist.
"""

from __future__ import annotations

import json
import os
import sys
import time
from itertools import pairwise

import numpy as np
import torch  # pyright: ignore[reportMissingImports]  (an extra)
import torch.distributed as dist  # pyright: ignore[reportMissingImports]  (an extra)
from torch import nn  # pyright: ignore[reportMissingImports]  (an extra)
from torch.distributed.algorithms.ddp_comm_hooks import (  # pyright: ignore[reportMissingImports]
    default_hooks,
    powerSGD_hook,
)
from torch.nn.parallel import (  # pyright: ignore[reportMissingImports]  (an extra)
    DistributedDataParallel,
)

PORT = 9913
KINDS = ("plain", "fp16", "powersgd")
RANK = 4


def network(widths: list[int]) -> nn.Sequential:
    """Return the ReLU network of `step.py`, with the same weights."""
    random, layers = np.random.default_rng(0), []
    for rows, columns in pairwise(widths):
        layer = nn.Linear(rows, columns)
        kernel = (random.standard_normal((rows, columns)) / rows**0.5).astype("float32")
        with torch.no_grad():
            layer.weight.copy_(torch.tensor(kernel.T))
            layer.bias.zero_()
        layers += [layer, nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def wrapped(kind: str, widths: list[int]) -> DistributedDataParallel:
    """Return the network under DDP with a kind's hook.

    PowerSGD has all gradients in one bucket. Another thread would send the messages of a second
    bucket, which may overtake messages of the first bucket, and gloo would report a mismatch.
    """
    one_bucket = {"bucket_cap_mb": 1024} if kind == "powersgd" else {}
    model = DistributedDataParallel(network(widths), **one_bucket)
    if kind == "fp16":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    if kind == "powersgd":
        # PowerSGD allows compression from the second step at the earliest.
        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=RANK, start_powerSGD_iter=2
        )
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return model


def main(widths: list[int], rows: int, rate: float) -> None:
    """Join the other hosts, and take the steps that the input asks for."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # standard output must have nothing but answers
    torch.set_num_threads(1)
    host, _, _ = os.environ["JAX_COORDINATOR_ADDRESS"].rpartition(":")
    rank, world = (int(os.environ[f"JAX_{name}"]) for name in ("PROCESS_ID", "NUM_PROCESSES"))
    dist.init_process_group("gloo", init_method=f"tcp://{host}:{PORT}", rank=rank, world_size=world)
    random = np.random.default_rng(1 + rank)
    inputs = torch.tensor(random.standard_normal((rows, widths[0])).astype("float32"))
    targets = torch.tanh(inputs[:, : widths[-1]])
    models = {kind: wrapped(kind, widths) for kind in KINDS}
    optimizers = {kind: torch.optim.SGD(models[kind].parameters(), lr=rate) for kind in KINDS}
    print(json.dumps({"version": torch.__version__}), file=answers, flush=True)
    for line in sys.stdin:
        kind, steps = line.split()
        # Without a barrier the time would include waiting for hosts that begin later.
        dist.barrier()
        start, value = time.perf_counter(), torch.zeros(())
        for _ in range(int(steps)):
            optimizers[kind].zero_grad()
            value = nn.functional.mse_loss(models[kind](inputs), targets)
            value.backward()
            optimizers[kind].step()
        found = {"seconds": time.perf_counter() - start, "loss": value.item()}
        print(json.dumps(found), file=answers, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
