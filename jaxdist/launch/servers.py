"""The placement of a run's servers on separate machines."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from jaxdist.checkpoint.identity import base_of
from jaxdist.config import read, validate
from jaxdist.errors import ConfigError
from jaxdist.experiment import ExperimentConfig
from jaxdist.launch.contract import Engine, Job
from jaxdist.train.strategy.config import Hybrid, ParameterServer
from jaxdist.wire.config import stays_on_machine


def with_servers(job: Job, engine: Engine, nodes: int) -> Job:
    """Return a job whose servers run on separate machines.

    Args:
      nodes: the number of machines for servers.

    Raises:
      ConfigError: the config has no servers, other machines cannot reach them, or they cannot be
        divided evenly among the machines; or the engine cannot run the job.
    """
    strategy = _config(job).strategy
    if not isinstance(strategy, Hybrid | ParameterServer):
        raise ConfigError(
            f"--servers {nodes}: the config has strategy.type {strategy.type}, and such a run has "
            "no servers: leave out --servers, or set strategy.type hybrid or parameter_server"
        )
    if strategy.servers % nodes:
        raise ConfigError(
            f"--servers {nodes}: {strategy.servers} servers (strategy.servers) cannot be divided "
            f"evenly among {nodes} machines: change one of the two numbers"
        )
    remote = f"strategy.processes.remote_servers={strategy.servers}"
    overrides = *job.overrides, remote
    given = replace(job, overrides=overrides, servers=strategy.servers, server_nodes=nodes)
    engine.check(given)
    _check_reach(f"--servers {nodes}", strategy.processes.host, job, engine)
    run = _config(given).run.directory
    return replace(given, run=str(base_of(run, Path(job.config))))


def check_workers(job: Job, engine: Engine, strategy: ParameterServer) -> None:
    """Check that the processes of a job can be the supervisor and the workers of a run.

    Raises:
      ConfigError: the run has fewer workers than processes besides the supervisor, or processes on
        other machines cannot reach the servers.
    """
    if job.count - 1 > strategy.workers:
        raise ConfigError(
            f"--nodes {job.nodes} --processes-per-node {job.processes}: process 0 supervises the "
            f"run, and the other {job.count - 1} processes are workers, but strategy.workers is "
            f"{strategy.workers}: change one of these numbers"
        )
    if job.nodes > 1:
        _check_reach(f"--nodes {job.nodes}", strategy.processes.host, job, engine)


def _check_reach(asked: str, host: str, job: Job, engine: Engine) -> None:
    if stays_on_machine(host) and not engine.on_one_machine(job):
        raise ConfigError(
            f"{asked}: strategy.processes.host {host} is reached on one machine only: set "
            "strategy.processes.host: auto, and certificates (strategy.processes.tls)"
        )


def _config(job: Job) -> ExperimentConfig:
    return validate(read(Path(job.config), job.overrides), ExperimentConfig)
