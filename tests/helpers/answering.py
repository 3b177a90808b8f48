"""What a child process is asked in the tests of children; it imports next to nothing."""

import os
import time


def answer(item: int) -> int:
    """13 ends the process as a failed check of XLA does, 14 says nothing."""
    if item == 13:
        os.write(2, b"F1122 17:26:57.8 78 x.cc:497] Check failed: 1 == 2\n*** Check failure\n")
        os.abort()
    if item == 14:
        time.sleep(1e3)
    return item * item
