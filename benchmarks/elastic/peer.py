"""A program that trains the same model under torchrun, with torch and nothing of jaxdist.

`torchrun --nproc-per-node N --max-restarts R peer.py FOLDER STEPS` trains data parallel (DDP, gloo)
with a checkpoint every 100 steps, as torch's documentation of elastic training shows. Each rank
writes its process id to FOLDER; rank 0 adds a line "TIME STEP" to FOLDER/steps after each step.

In torch 2.13 all restarts share one store, in which gloo finds the addresses of the processes that
have ended ("connectFullMesh failed", on every restart). `ENVIRON` has torch's switch that gives
each restart a new store.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from pathlib import Path
from typing import Any

ENVIRON = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
EVERY = 100
BATCH = 64


def main(folder: Path, steps: int) -> None:
    """Train up to `steps` steps, from the last checkpoint if there is one."""
    torch: Any = importlib.import_module("torch")  # jaxdist's Python may lack torch
    parallel: Any = importlib.import_module("torch.nn.parallel")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    (folder / f"pid_{rank}").write_text(str(os.getpid()))
    torch.manual_seed(0)
    nn = torch.nn
    sizes = (64, 512, 256, 10)
    layers = [nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 10)]
    model = parallel.DistributedDataParallel(nn.Sequential(*layers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    saved, first = folder / "saved.pt", 0
    if saved.exists():
        found = torch.load(saved, weights_only=True)
        model.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
        first = found["step"]
    x = torch.randn(BATCH // world, sizes[0])
    labels = torch.randint(0, sizes[-1], (BATCH // world,))
    with (folder / "steps").open("a", buffering=1) as log:
        for step in range(first + 1, steps + 1):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), labels).backward()
            optimizer.step()
            time.sleep(0.02)  # about as long as a step of jaxdist on as many processes
            if rank == 0:
                log.write(f"{time.time()} {step}\n")
                if step % EVERY == 0:
                    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                    # Renamed when complete: a kill during the save leaves the previous checkpoint.
                    torch.save({**state, "step": step}, saved.with_suffix(".new"))
                    saved.with_suffix(".new").rename(saved)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
