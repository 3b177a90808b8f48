"""A process that an agent keeps ready: it imports all, and waits for what it is to train.

`python -m jaxdist.cli.standby`, by `jaxdist.elastic.members` alone: the agent has prepared the
environment, which jax reads once. One JSON line on the standard input begins it.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import threading
import time


def main() -> None:
    """Wait, train, and end with the run's exit code; without a line there is nothing to do."""
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    from jaxdist.cli import runs, shared
    from jaxdist.cli.output import lasting_output
    from jaxdist.runtime.standard_input import lines

    runs.import_all()
    line = next(lines(), None)
    if line is None:
        return
    begun = time.perf_counter_ns()
    order = json.loads(line)
    threading.Thread(target=_end_with_agent, daemon=True).start()
    os.environ.update(order["environ"])
    with lasting_output():
        try:
            code = runs.train_process(**order["args"], begun=begun)
        except (Exception, KeyboardInterrupt) as error:
            code = shared.report(error)
        sys.exit(code)


def _end_with_agent() -> None:
    """Nobody begins anew what is lost when the agent is gone: save, and stop."""
    from jaxdist.runtime.standard_input import wait_for_end

    wait_for_end()
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
