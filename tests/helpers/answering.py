"""The function that child processes run in the tests of children; it imports almost nothing."""

import os
import time


def answer(item: int) -> int:
    """Return the square of `item`, after the failure or delay that `item` selects.

    13 aborts the process like a failed check of XLA, 14 sleeps, 15 loops forever, and 16 computes
    for a tenth of the time only.
    """
    if item == 13:
        os.write(2, b"F1122 17:26:57.8 78 x.cc:497] Check failed: 1 == 2\n*** Check failure\n")
        os.abort()
    if item == 14:
        time.sleep(1e3)
    while item == 15:
        pass
    for _ in range(20 if item == 16 else 0):
        time.sleep(0.1)
        until = time.process_time() + 0.01
        while time.process_time() < until:
            pass
    return item * item
