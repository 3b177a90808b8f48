"""The process that forks an agent's training processes: it imports everything in advance.

Only `jaxdist.elastic.agent` starts `python -m jaxdist.cli.fork_server`: the agent has prepared the
environment, which JAX reads once. A forked process reads a JSON line on its standard input, which
names its run.
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
    """Serve forks; a forked process trains, and exits with the run's exit code."""
    from jaxdist.runtime.forks import await_fork, hold_signals

    hold_signals()
    # If a process is stuck, the agent asks all processes for their stacks by SIGUSR2.
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    from jaxdist.cli import output, runs, shared
    from jaxdist.runtime import children

    runs.import_all()
    if not await_fork():
        return
    begun = time.perf_counter_ns()
    line = next(children.input_lines(), None)
    if line is None:
        return
    order = json.loads(line)
    threading.Thread(target=_end_with_agent, daemon=True).start()
    os.environ.update(order["environ"])
    with output.lasting_output():
        try:
            code = runs.train_process(**order["args"], begun=begun)
        except (Exception, KeyboardInterrupt) as error:
            code = shared.print_error(error)
        sys.exit(code)


def _end_with_agent() -> None:
    """Save and stop once the agent is gone, because nothing would restart this process."""
    from jaxdist.runtime.children import wait_for_input_end

    wait_for_input_end()
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
