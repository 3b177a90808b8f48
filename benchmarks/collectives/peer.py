"""A separate program with `torch.distributed` over gloo, the peer of `jaxdist bench collectives`.

`python peer.py WORLD STORE` starts WORLD processes and prints an empty line. For each line
"BYTES TIMES" on its input, the processes run TIMES all-reduces of BYTES of float32, one after the
other, and then the program prints an empty line. The program imports torch and nothing of jaxdist.
"""

from __future__ import annotations

import os
import sys


def serve(rank: int, world: int, store: str, orders: int, done: int) -> None:
    """Run one process: for each line of `orders`, all-reduce, and write a byte to `done`."""
    import torch  # pyright: ignore[reportMissingImports]  (an extra)
    import torch.distributed as dist  # pyright: ignore[reportMissingImports]  (an extra)

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    os.write(done, b".")
    buffer = torch.zeros(0)
    with os.fdopen(orders) as lines:
        for line in lines:
            size_bytes, times = map(int, line.split())
            if buffer.nbytes != size_bytes:
                buffer = torch.zeros(size_bytes // 4)
            for _ in range(times):
                dist.all_reduce(buffer)
            os.write(done, b".")
    dist.destroy_process_group()


def main(world: int, store: str) -> None:
    """Fork the processes, so that torch is imported once, and forward the input to each of them."""
    # The forked processes find torch imported already. torch is an extra, and may be missing.
    import torch.distributed  # noqa: F401  # pyright: ignore[reportMissingImports]

    done_read, done_write = os.pipe()
    orders = []
    for rank in range(world):
        read, write = os.pipe()
        if os.fork() == 0:
            # A write end left open in a sibling would keep a process from seeing the end of input.
            for other in (write, done_read, *orders):
                os.close(other)
            serve(rank, world, store, read, done_write)
            return
        os.close(read)
        orders.append(write)
    os.close(done_write)
    _answer(done_read, world)
    for line in sys.stdin:
        for write in orders:
            os.write(write, line.encode())
        _answer(done_read, world)


def _answer(done: int, world: int) -> None:
    """Wait for a byte of each process; exit if the pipe ends, since all processes have ended."""
    answers = 0
    while answers < world:
        found = len(os.read(done, world))
        if not found:
            sys.exit("all processes have ended")
        answers += found
    print(flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
