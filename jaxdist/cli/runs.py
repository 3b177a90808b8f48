"""The commands that train, and that use trained models."""

from __future__ import annotations

import importlib
import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from jaxdist.cli import shared
from jaxdist.runtime.rendezvous import JOIN_SECONDS

if TYPE_CHECKING:
    from jaxdist.run.hooks.contract import Hook
    from jaxdist.runtime.processes import Processes
    from jaxdist.types import JsonObject

LATE_MODULES = (
    "orbax.checkpoint",
    "tensorboardX.proto.event_pb2",
    "tensorboardX.record_writer",
)
"""The modules of other packages that most runs import only when they first use them."""


def train(
    config: shared.ConfigFile,
    overrides: shared.Overrides = None,
    *,
    devices: shared.Devices = None,
    resume: bool = False,
    profile: Annotated[str | None, typer.Option(metavar="STEPS")] = None,
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    distributed: bool = False,
    join_timeout: shared.AtLeastOne = JOIN_SECONDS,
    elastic: bool = False,
    count: Annotated[int, typer.Option("--processes", min=1)] = 1,
    restarts: shared.AtLeastOne = 3,
    proved: bool = False,
    json_file: shared.JsonFile = None,
) -> None:
    """Train the experiment of a config file.

    Args:
      resume: Resume from the newest complete checkpoint.
      profile: Trace steps for xprof and Perfetto: 10:13 traces steps 10 to 13; 4 traces the first
        four steps after a warm-up.
      coordinator: Address HOST:PORT of process 0.
      num_processes: Number of processes.
      process_id: Number of this process, counted from 0.
      distributed: Find the other processes through the environment of Slurm, MPI, Kubernetes or
        TPUs.
      join_timeout: Seconds to wait for the other processes.
      elastic: Start the processes of this machine, watch them, and restart them from the newest
        snapshot in memory when one is lost or stuck.
      count: --elastic: number of processes.
      restarts: --elastic: end the run after this many consecutive failures of a process without a
        new step between them.
      proved: Refuse to train without a current certificate of `jaxdist prove`.
    """
    extra = shared.prepare_devices(config, overrides, devices)
    if elastic:
        shared.alone(
            "--elastic", coordinator=coordinator, num_processes=num_processes,
            process_id=process_id, distributed=distributed, profile=profile,
            **{"--proved": proved},
        )  # fmt: skip
        _train_elastic(config, extra, count, restarts, resume=resume, json_file=json_file)
        return
    from jaxdist.runtime import lifetime
    from jaxdist.runtime.processes import find_processes

    processes = find_processes(
        os.environ,
        coordinator=coordinator,
        count=num_processes,
        index=process_id,
        detect=distributed,
    )
    code = train_process(
        str(config),
        extra,
        resume=resume,
        profile=profile,
        processes=processes,
        join_timeout=join_timeout,
        begun=lifetime.begun(),
        json_file=None if json_file is None else str(json_file),
        proved=proved,
    )
    raise typer.Exit(code)


def _train_elastic(
    config: Path,
    extra: list[str],
    count: int,
    restarts: int,
    *,
    resume: bool,
    json_file: Path | None,
) -> None:
    from jaxdist.cli import fork_server
    from jaxdist.elastic.agent import Agent, AgentSettings

    args = {"config": str(config), "extra": extra, "resume": resume}
    args |= {} if json_file is None else {"json_file": str(json_file)}
    settings = AgentSettings(args, count, restarts)
    raise typer.Exit(Agent(settings, shared.say, fork_module=fork_server.__name__).run())


def drill(
    config: shared.ConfigFile,
    overrides: shared.Overrides = None,
    *,
    failures: shared.AtLeastOne,
    count: Annotated[int, typer.Option("--processes", min=1)] = 2,
    seed: shared.AtLeastZero = 0,
    devices: shared.Devices = None,
    json_file: shared.JsonFile = None,
) -> None:
    """Train CONFIG under an agent, and kill and stop its processes on purpose.

    The command prints each recovery, and the fraction of time that was used for steps, with the
    predicted fraction. The exit code is 3 if the fraction is less than nine tenths of the
    prediction.

    Args:
      failures: Number of failures: each kills or stops a process.
      count: Number of processes of the run.
      seed: Seed that determines the time of each failure, its process, and whether the process is
        killed or stopped.
    """
    extra = shared.prepare_devices(config, overrides, devices)
    from jaxdist.cli import fork_server
    from jaxdist.commands.drill import drill as run

    run(
        config,
        extra,
        failures=failures,
        processes=count,
        seed=seed,
        json_file=json_file,
        say=shared.say,
        fork_module=fork_server.__name__,
    )


def import_all() -> None:
    """Import all modules that training needs, including `LATE_MODULES`.

    These imports take most of the time from the start of a run to its first step.
    """
    for module in ("jaxdist.runtime.connection", "jaxdist.runtime.processes", "jaxdist.run.train"):
        importlib.import_module(module)
    # A missing module is ignored here, since a run that needs the module reports the error.
    for module in LATE_MODULES:
        with suppress(ImportError):
            importlib.import_module(module)


def train_process(
    config: str,
    extra: list[str],
    *,
    resume: bool = False,
    run: JsonObject | None = None,
    profile: str | None = None,
    processes: Processes | None = None,
    join_timeout: int = JOIN_SECONDS,
    begun: int,
    json_file: str | None = None,
    proved: bool = False,
) -> int:
    """Train as one process of a run, and return the exit code.

    The environment must already be prepared.

    Args:
      config: the path of the configuration file.
      extra: the settings that override the file.
      resume: whether to resume from the newest complete checkpoint.
      run: the identity of the run, as `jaxdist.checkpoint.identity.Identity.plain` returns it, or
        None for a new identity.
      profile: the steps to trace, as the option `--profile` states them, or None to trace none.
      processes: the position of this process among its peers, or None to find it in the
        environment.
      join_timeout: the time to wait for the other processes, in seconds.
      begun: the start time of the process (see `jaxdist.run.train.train`).
      json_file: a file for the result, which is written if the run ends without an error. None
        writes no file.
      proved: whether the config must have a current certificate.

    Raises:
      JaxdistError: the config is invalid, there is no current certificate, or the run fails.
    """
    from jaxdist.checkpoint.identity import Identity
    from jaxdist.commands.servers import run_of_workers, serve_here
    from jaxdist.errors import ConfigError
    from jaxdist.run.train import train as trained
    from jaxdist.runtime.connection import connected
    from jaxdist.runtime.processes import find_processes

    processes = processes or find_processes(os.environ)
    if processes is not None and (base := run_of_workers(config, extra)) is not None:
        # The processes of a run with parameter servers communicate through the servers, so jax must
        # not join them.
        if not resume:
            raise ConfigError(
                f"strategy.type parameter_server in {processes.count} processes needs --resume, so "
                "that all of them find the same run directory: add --resume, also for a new run",
                setting=("strategy", "type"),
            )
        if processes.index:
            serve_here(base, None, shared.say, role="worker", wait_seconds=join_timeout)
            return 0
        extra = [*extra, f"strategy.processes.remote_workers={processes.count - 1}"]
        processes = None
    with connected(processes, shared.print_error, seconds=join_timeout):
        hooks: list[Hook] = []
        if proved:
            import jax

            from jaxdist.proofs.certificate import current

            hooks.append(current(Path(config), extra, jax.device_count()))
        found = trained(
            config,
            extra,
            hooks=hooks,
            resume=resume,
            identity=None if run is None else Identity.of(run),
            profile=profile,
            begun=begun,
            console=shared.console(),
        )
        if json_file is not None:
            found.write(Path(json_file))
    return found.exit_code


def evaluate(
    run: shared.Run,
    overrides: shared.Overrides = None,
    *,
    step: shared.CheckpointStep = None,
    devices: shared.Devices = None,
    json_file: shared.JsonFile = None,
) -> None:
    """Evaluate a run's checkpoint on the complete held-out split."""
    extra = shared.prepare_run(run, overrides, devices)
    from jaxdist.commands.evaluate import evaluate_run

    evaluate_run(run, extra, step=step, json_file=json_file, console=shared.console())


def replay(
    run: shared.Run, *, devices: shared.Devices = None, json_file: shared.JsonFile = None
) -> None:
    """Repeat a run with parameter servers, in the order in which its servers received messages.

    The command prints whether the servers' last saved state is reproduced to the bit. The exit code
    is 1 if the state differs.
    """
    shared.prepare_run(run, [], devices)
    from jaxdist.commands.replay.replay import replay as again

    if not again(run, shared.console(), json_file):
        raise typer.Exit(1)


def servers(
    run: shared.Run,
    count: Annotated[int | None, typer.Argument(min=1)] = None,
    *,
    here: bool = False,
    host: str | None = None,
    wait: Annotated[float | None, typer.Option(min=0, metavar="SECONDS")] = None,
    json_file: shared.JsonFile = None,
) -> None:
    """Let table servers join or leave a run while it trains.

    Whole ranges of rows pass to servers that join, and from servers that leave. No push is lost.
    COUNT is the number of table servers that the run shall have. The host of the run starts the
    missing servers, or lets surplus servers leave. With --here, the server runs on the host of this
    command, until the run ends; SIGTERM and Ctrl-C let it leave.

    Args:
      count: Number of table servers on all hosts.
      here: Run one more table server, on this host.
      host: --here: address at which the server listens; by default the address from which this host
        reaches the run.
      wait: --here: wait for the run to begin, and stay until it ends. SIGTERM does not let the
        server leave.
    """
    if wait is None:
        shared.prepare_run(run, [], None)
    from jaxdist.commands.servers import ask_for_servers, serve_here
    from jaxdist.errors import ConfigError

    if here == (count is not None):
        raise ConfigError("give either the number of table servers or --here")
    if host is not None and not here:
        raise ConfigError("--host is the address of the server that --here starts: add --here")

    if wait is not None and not here:
        raise ConfigError("--wait is the time for which --here waits for the run: add --here")

    if count is None:
        serve_here(run, host, shared.say, json_file, wait_seconds=wait)
    else:
        shared.say(ask_for_servers(run, count, json_file))


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...")],
    *,
    json_file: shared.JsonFile = None,
    html: Path | None = None,
    live: bool = False,
    every: Annotated[float, typer.Option(min=1)] = 15,
    compiled: Annotated[bool, typer.Option("--compile/--no-compile")] = True,
) -> None:
    """Print the time of a run by activity, over all its restarts.

    Args:
      runs: Run directories.
      html: Write an HTML page with curves, time, memory, bytes sent, pipeline schedule and energy
        to this file.
      live: --html: rewrite the page until the runs have ended.
      every: --live: seconds between two versions of the page.
      compiled: --html: compile the step of each run, and show its memory and its bytes per mesh
        axis.
    """
    from jaxdist.errors import ConfigError

    if html is None:
        from jaxdist.run.report.goodput import report_goodput as tell

        if live or (json_file is not None and len(runs) > 1):
            wrong = (
                "--live rewrites the page of --html, which is missing"
                if live
                else "--json writes the report of a single run, but several are given"
            )
            raise ConfigError(f"{wrong}: give {'--html FILE' if live else 'one run directory'}")
        for run in runs:
            tell(run, json_file, console=shared.console())
        return
    shared.alone("--html", **{"--json": json_file is not None})
    counts = [count for run in runs if (count := shared.devices_of(run)) is not None]
    if compiled and counts:
        from jaxdist.runtime import environment

        environment.prepare(fake_devices=max(counts))
    from jaxdist.run.report.page.write import report_page

    report_page(
        runs,
        html,
        compile_step=_inspected if compiled else None,
        live_seconds=every if live else None,
        say=shared.say,
    )


def _inspected(config: Path) -> JsonObject:
    """Compile the step of a run's config for fake CPU devices, and return its cost as JSON values.

    Raises:
      JaxdistError: the config imports the user's code, which a report never runs; the mesh does not
        determine the number of devices; or the step cannot be compiled here.
    """
    from jaxdist.config import read
    from jaxdist.config.importing import foreign_code
    from jaxdist.errors import ConfigError
    from jaxdist.inspect.program import inspect_step, open_subject
    from jaxdist.inspect.report import inspection_json

    count, code = shared.devices_of(config.parent), foreign_code(read(config).values)
    if code:
        raise ConfigError(
            "the report does not show the memory and the bytes of this step, because the config "
            f"{code[0]}, and to compile the step would run this code. To see these numbers, run "
            "`jaxdist inspect` with the config"
        )
    if count is None:
        raise ConfigError(
            "the mesh of the run's config leaves the size of an axis open (-1), so the number of "
            "devices is unknown: run `jaxdist inspect` with the config and --devices N"
        )
    found = inspect_step(open_subject(config, [f"mesh.fake_devices={count}"]))
    return inspection_json(found)


def generate(
    run: shared.Run,
    overrides: shared.Overrides = None,
    *,
    prompts: Annotated[list[str], typer.Option("--prompt")],
    tokens: shared.AtLeastOne = 256,
    temperature: Annotated[float, typer.Option(min=0)] = 0.8,
    top_k: shared.AtLeastOneOrNone = None,
    top_p: Annotated[float, typer.Option(min=0, max=1)] = 1.0,
    stops: Annotated[list[str] | None, typer.Option("--stop")] = None,
    seed: shared.AtLeastZero = 0,
    step: shared.CheckpointStep = None,
    devices: shared.Devices = None,
    json_file: shared.JsonFile = None,
) -> None:
    """Continue prompts with a run's language model.

    Args:
      prompts: Text to continue; repeat the option for a batch of texts.
      tokens: Largest number of tokens to add to each text.
      temperature: Temperature of the sampling; 0 always chooses the most likely token.
      top_k: Choose only among this number of most likely tokens.
      top_p: Choose only among the most likely tokens whose probabilities add up to this value
        (nucleus sampling).
      stops: A token that ends a text, besides the end of a document.
      seed: Seed of the random choices.
    """
    extra = shared.prepare_run(run, overrides, devices)
    from jaxdist.commands.evaluate import generate_from_run
    from jaxdist.train.sampling import Sampling

    texts = generate_from_run(
        run,
        extra,
        prompts=prompts,
        tokens=tokens,
        sampling=Sampling(temperature, top_k, top_p, seed),
        stops=stops or (),
        step=step,
        json_file=json_file,
        console=shared.console(),
    )
    for text in texts:
        typer.echo(text)
