"""The functions that all processes of a run share, for its experiment and for connections."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from jaxdist.checkpoint.identity import Identity, check_identity
from jaxdist.experiment import Experiment, build, load
from jaxdist.param_server.processes.parts import sharded_of
from jaxdist.param_server.training.state import Sharded
from jaxdist.types import JsonObject
from jaxdist.wire.config import ProcessesConfig, stays_on_machine
from jaxdist.wire.contract import Service
from jaxdist.wire.frames import spec_for
from jaxdist.wire.ports import Place, address_of, place_address
from jaxdist.wire.rpc import RpcServer, RpcWire
from jaxdist.wire.security import read_tls, read_token


def run_of(setup: JsonObject) -> Path:
    """Return the run directory that a setup names.

    Raises:
      RunError: the directory belongs to another run now.
    """
    run = Identity.of(setup["run"])
    assert run.path is not None
    check_identity(run.path, run.id)
    return run.path


def run_experiment(setup: JsonObject) -> tuple[Experiment, Sharded]:
    """Return the experiment of a setup's run, and the distribution of its state over servers.

    Raises:
      RunError: the directory belongs to another run now.
    """
    run_of(setup)
    return sharded_run(Path(setup["config"]))


def sharded_run(path: Path) -> tuple[Experiment, Sharded]:
    """Return the experiment of a run's config, and the distribution of its state over servers."""
    document, config = load(path)
    experiment = build(config, document)
    return experiment, sharded_of(experiment)


def wires_to(sharded: Sharded, setup: JsonObject) -> list[RpcWire]:
    """Return the wires to the ports of a setup: to all servers, or to the aggregator of a rack."""
    processes = sharded.cluster.processes
    token, tls = read_token(Path(setup["token"])), read_tls(processes.tls)
    shares_memory = processes.shared_memory and stays_on_machine(processes.host)
    host = setup["address"]
    return [
        RpcWire(
            place_address(host, port),
            token,
            partial(spec_for, push=push, shard=layout.spec),
            tls,
            max(push.size_bytes, layout.spec.size_bytes) if shares_memory else 0,
        )
        for layout, push, port in zip(sharded.layouts, sharded.pushes, setup["ports"], strict=True)
    ]


def server_place(setup: JsonObject, rpc: RpcServer) -> Place:
    """Return the place of a port of this process (see `jaxdist.wire.ports.Place`)."""
    host = setup.get("host")
    return rpc.port if host is None else address_of(host, rpc.port)


def listening(
    service: Service, processes: ProcessesConfig, setup: JsonObject, place: int, clients: int
) -> RpcServer:
    """Open a port on which a service accepts the run's workers.

    Args:
      place: the index of the port among all ports of the run.
      clients: the number of workers.

    Raises:
      WireError: the port cannot be opened, as in `RpcServer`.
    """
    return RpcServer(
        service,
        read_token(Path(setup["token"])),
        host=setup.get("host") or setup["address"],
        port=processes.port and processes.port + place,
        tls=read_tls(processes.tls),
        sessions=4 * clients + 8,
    )
