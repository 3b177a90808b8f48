"""A program that trains the CNN of configs/cnn/fashion.yaml in two processes of torch.

Its arguments are an npz archive, the steps, the batch size and seeds; it prints the
held-out accuracy for each seed. It uses nothing of jaxdist.
"""

import math
import os
import socket
import sys

import numpy as np

WORLD, RATE, MOMENTUM = 2, 0.05, 0.9


def arrays(path, split):
    """Return images float32 [N, 1, 28, 28] in 0..1, and labels int64 [N]."""
    with np.load(path) as held:
        images = held[f"x_{split}"].transpose(0, 3, 1, 2).astype(np.float32) / 255
        return images, held[f"y_{split}"].astype(np.int64)


def network():
    """Return the network with the initial distributions of jaxdist's network."""
    import torch  # pyright: ignore[reportMissingImports]
    from torch import nn  # pyright: ignore[reportMissingImports]

    layers = [nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
    layers += [nn.Linear(32 * 7 * 7, 64), nn.ReLU(), nn.Linear(64, 10)]
    for layer in layers:
        if hasattr(layer, "weight"):
            fan_in = layer.weight[0].numel()
            gain = 1 if layer is layers[-1] else 2
            # The normal distribution is cut off at two deviations, and then has this deviation.
            std = math.sqrt(gain / fan_in) / 0.87962566103423978
            torch.nn.init.trunc_normal_(layer.weight, 0.0, std, -2 * std, 2 * std)
            torch.nn.init.zeros_(layer.bias)
    return nn.Sequential(*layers)


def train(rank, path, seed, steps, batch):
    """Take the steps, and return the network."""
    import torch  # pyright: ignore[reportMissingImports]

    torch.manual_seed(seed)  # the same initial values in both processes
    model = torch.nn.parallel.DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), RATE, MOMENTUM)
    images, labels = (torch.from_numpy(each) for each in arrays(path, "train"))
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    for step in range(steps):
        rows = order[torch.arange(step * batch, (step + 1) * batch) % len(order)][rank::WORLD]
        loss = torch.nn.functional.cross_entropy(model(images[rows]), labels[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.module


def main(path, steps, batch, *seeds):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    child = os.fork()  # before torch is imported, which starts threads
    rank = 0 if child else 1
    import torch  # pyright: ignore[reportMissingImports]

    torch.set_num_threads(1)
    place = f"tcp://127.0.0.1:{port}"
    torch.distributed.init_process_group("gloo", place, rank=rank, world_size=WORLD)
    for seed in map(int, seeds):
        model = train(rank, path, seed, int(steps), int(batch))
        if rank == 0:
            images, labels = (torch.from_numpy(each) for each in arrays(path, "test"))
            with torch.inference_mode():
                print((model(images).argmax(1) == labels).float().mean().item(), flush=True)
        torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    if child:
        sys.exit(os.waitpid(child, 0)[1] != 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
