"""The process that forks the training processes of an agent.

The process imports all modules of training in advance, so that forked processes start fast. Only
`jaxdist.elastic.agent` starts `python -m jaxdist.cli.fork_server`, after it has prepared the
environment, which JAX reads only once. A forked process reads a line of JSON with the arguments of
its run from its standard input.
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
    """Fork processes until the agent needs no more of them, then return.

    In a forked process, this function trains, and exits with the run's exit code.
    """
    from jaxdist.runtime.forks import await_fork, hold_signals

    hold_signals()
    # If a process is stuck, the agent sends SIGUSR2 to all processes, which print their stacks.
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
    """Wait until the agent has ended, and then save and stop this process.

    Without an agent, nothing would restart the process after a failure.
    """
    from jaxdist.runtime.children import wait_for_input_end

    wait_for_input_end()
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
