"""The supervisor of a run, which starts and ends servers and workers on this machine."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue

import jax.numpy as jnp

from jaxdist.checkpoint.identity import given_identity
from jaxdist.checkpoint.layout import steps_present
from jaxdist.errors import CheckpointError, RunError, StoppedError
from jaxdist.metrics.account import Activity
from jaxdist.param_server.training.files import clear, prune, read_shard, write_shard
from jaxdist.param_server.training.fleet import EssentialProcesses
from jaxdist.param_server.training.ledger import ClockReports
from jaxdist.param_server.training.state import Sharded
from jaxdist.runtime.children import Event, end_together, how_ended
from jaxdist.runtime.environment import plan_environment
from jaxdist.runtime.forks import ForkServer
from jaxdist.train.state import TrainState
from jaxdist.train.strategy.contract import Prepared
from jaxdist.types import JsonObject
from jaxdist.wire.children import Role, RunProcess, WorkerTeam
from jaxdist.wire.config import address_here
from jaxdist.wire.offers import Offers
from jaxdist.wire.security import read_tls, read_token, token_file

LOGS = "logs"
POLL_SECONDS = 0.2
SIGNS_OF_LIFE = frozenset({"listening", "measured", "clock", "saved"})
AHEAD_SECONDS = 1.0
"""The seconds between the order to stop and the clock at which all processes stop. The order must
arrive before any worker passes that clock."""
STOP_SECONDS = 20.0
"""The seconds without progress after which a stopping run is killed. Twice the duration of the
slowest worker's last clock is added. Schedulers kill a process 30 s after their signal."""


class Supervisor:
    """A supervisor of a run's processes, which also does the work that is due between steps.

    Args:
      prepared: the prepared run.
      token: the file with the token that the run's processes share.
      module: the Python module whose process forks the run's processes (`jaxdist.runtime.forks`).
      config: the config file from which each process builds the run.
    """

    def __init__(
        self, sharded: Sharded, prepared: Prepared, token: Path, *, module: str, config: Path
    ) -> None:
        self.sharded, self.cluster, self.prepared = sharded, sharded.cluster, prepared
        self.directory, self.token = prepared.directory, token
        self.module, self.config = module, config
        self.forks: dict[bool, ForkServer] = {}
        self.id = given_identity(self.directory).id
        self.events: SimpleQueue[Event] = SimpleQueue()
        settings = self.cluster.processes
        self.offers = Offers({"server": settings.remote_servers, "worker": settings.remote_workers})
        self.fleet = EssentialProcesses(self.cluster, self._child, self._next)
        self.team = WorkerTeam()
        first, last = int(prepared.state.step), prepared.stages[-1].last_step
        self.first, self.last = self.cluster.clocks(first), self.cluster.clocks(last)
        self.total_steps = last
        names = sharded.program.metrics
        self.ledger = ClockReports(self.cluster, names, sharded.rate_of, self.first)
        self.saved: Counter[int] = Counter()
        self.heard = time.monotonic()
        self.told: float | None = None
        self.stop = self.last

    def step_of(self, clock: int) -> int:
        """Return the number of steps that a worker has taken when a clock begins."""
        return min(clock * self.cluster.local_steps, self.total_steps)

    def run(self) -> TrainState:
        """Run all remaining clocks of the run, and return the last training state."""
        state = self.prepared.state
        try:
            self._gather()
            if self.first >= self.last:
                return state
            due = {self.cluster.clocks(step) for step in self._due_steps()}
            self.forks = self._forks()
            for forks in {*self.forks.values()}:
                # The imports of the fork servers take seconds. Meanwhile this process writes the
                # files of the shards.
                forks.start()
            self._shards(state)
            self.fleet.begin(sorted(due))
            for number in range(self.cluster.workers):
                self._worker(number, number)
            return self._through(state, due)
        finally:
            self._end()

    def _gather(self) -> None:
        """Wait for the processes that other hosts start."""
        settings, mesh = self.cluster.processes, self.sharded.program.layout.mesh
        settings = settings.listening_on(address_here(settings.host))
        (self.directory / LOGS).mkdir(exist_ok=True)
        self.offers.open(self.directory, settings, read_token(self.token), mesh.devices.size)
        stopped = partial(getattr, self.prepared.hooks, "told_to_stop")
        self.offers.gather(self.prepared.note, settings.deadline_seconds, stopped)

    def _due_steps(self) -> Iterator[int]:
        for step in range(self.step_of(self.first) + 1, self.total_steps + 1):
            if self.prepared.hooks.due(step) or step == self.total_steps:
                yield step

    def _shards(self, state: TrainState) -> None:
        """Write each server's initial state, unless all servers have saved the first clock."""
        clear(self.directory)
        try:
            # The shards are read to check that the checkpoint of every server is intact.
            for layout in self.sharded.layouts:
                read_shard(self.directory, self.sharded, layout, self.first)
        except CheckpointError as error:
            if steps_present(self.directory / "shards" / "server_0"):
                self.prepared.note(
                    "the servers begin with the parameters of the checkpoint, not with the "
                    f"states that they saved: {error}"
                )
            for layout, shard in zip(
                self.sharded.layouts, self.sharded.parted(state, self.first), strict=True
            ):
                write_shard(self.directory, layout.server, shard)
        prune(self.directory, lambda clock: clock != self.first)

    def _setup(self) -> JsonObject:
        return {
            "run": {"id": self.id, "path": str(self.directory)},
            "config": str(self.config),
            "token": str(self.token),
            "clock": self.first,
            "stop": self.stop,
            "address": address_here(self.cluster.processes.host),
        }

    def _forks(self) -> dict[bool, ForkServer]:
        """Return the processes that fork servers (False) and workers (True).

        If the workers compute on CPUs, a single process forks both servers and workers.
        """
        log, mesh = self.directory / LOGS / "forks.log", self.sharded.program.layout.mesh
        log.parent.mkdir(exist_ok=True)
        workers = servers = ForkServer(self.module, log)
        if mesh.devices.flat[0].platform != "cpu":
            # A server computes on the host, on as many fake devices as the workers' mesh has
            # devices.
            planned = plan_environment(dict(os.environ), fake_devices=mesh.devices.size)
            servers = ForkServer(self.module, log, {**os.environ, **planned})
        return {False: servers, True: workers}

    def _child(self, role: Role, number: int, /, **more: object) -> RunProcess:
        return RunProcess(
            role,
            number,
            {**self._setup(), "number": number, **more},
            begin=(self.offers.take(role) or self.forks[role == "worker"]).begin,
            log=self.directory / LOGS / f"{role}_{number}.log",
            events=self.events,
        )

    def _worker(self, client: int, slot: int) -> None:
        self.team.slots[client] = slot
        ports = self.fleet.ports(slot)
        self.team.workers[client] = self._child("worker", client, slot=slot, ports=ports)
        with (self.directory / "order" / "clients.jsonl").open("a") as file:
            told = {"first": self.first, "client": client, "slot": slot}
            file.write(json.dumps(told) + "\n")

    def _next(self, what: str) -> Event:
        """Return the next message of a process.

        Args:
          what: a description of the message that the supervisor waits for, for errors.

        Raises:
          RunError: a process ended unexpectedly, or no message arrived for too long.
        """
        try:
            event = self.events.get(timeout=POLL_SECONDS)
        except Empty:
            # Nothing has arrived: an empty event lets the checks below see the deadlines.
            event = Event(self.fleet.servers[0], {})
        self._check_stop(what)
        # A server reports counters even while all wait, so such a report is not a sign of life.
        if event.code is not None or event.what.get("event") in SIGNS_OF_LIFE:
            self.heard = time.monotonic()
        elif time.monotonic() - self.heard > self.cluster.processes.deadline_seconds:
            self._silent(what)
        if event.code is not None:
            self._ended(event.child, event.code)
        return event

    def _check_stop(self, what: str) -> None:
        """Kill a stopping run that makes no more progress.

        Args:
          what: a description of the message that the supervisor waits for, for errors.

        Raises:
          StoppedError: the run did not reach the clock at which it should stop.
        """
        if not self.prepared.hooks.told_to_stop:
            return
        now = time.monotonic()
        self.told = self.told or now
        seconds = STOP_SECONDS + 2 * self.ledger.longest_seconds
        if now - max(self.told, self.heard) > seconds:
            late = ", ".join(map(str, self._late()))
            raise StoppedError(
                f"the run was asked to stop, but waited {seconds:.0f} s for {what} in "
                f"vain{f' ({late} is behind)' if late else ''}. The run ends without a new "
                "checkpoint; --resume continues from the newest checkpoint"
            )

    def _silent(self, what: str) -> None:
        """Kill the workers for which all other workers wait, so that new workers replace them.

        Args:
          what: a description of the message that the supervisor waits for, for errors.

        Raises:
          RunError: the supervisor waits, although no worker is late.
        """
        seconds = self.cluster.processes.deadline_seconds
        late = self._late()
        if not late:
            raise RunError(
                f"waited {seconds:g} s for {what}, and no worker is late: read the logs of the "
                "servers, or raise strategy.processes.deadline_seconds"
            )
        names = ", ".join(map(str, late))
        self.prepared.note(
            f"waited {seconds:g} s for {what}: {names} is ended, since no worker makes progress"
        )
        self.heard = time.monotonic()
        for child in late:
            child.process.kill()

    def _late(self) -> list[RunProcess]:
        """Return the workers that have computed the fewest clocks."""
        team = self.team
        behind = self.ledger.behind({team.slots[client] for client in team.workers})
        return [child for client, child in team.workers.items() if team.slots[client] in behind]

    def _ended(self, child: RunProcess, code: int) -> None:
        if child.role != "worker":
            raise RunError(
                f"{child} ended ({how_ended(code)}) and its state is lost; use --resume to "
                f"continue from the newest checkpoint. {child.last_words()}"
            )
        if self.team.workers.get(child.number) is not child:
            return
        slot = self.team.slots[child.number]
        del self.team.workers[child.number]
        self.fleet.tell(slot, {"leave": child.number})
        if code == 0:
            self.team.done.add(slot)
            return
        self.team.deaths[slot] += 1
        if self.team.deaths[slot] >= self.cluster.processes.deaths:
            raise RunError(
                f"{child} ended ({how_ended(code)}). This worker has now lost "
                f"{self.team.deaths[slot]} processes in a row without completing a step: "
                f"{child.last_words()}"
            )
        # Servers refuse a number that was ever used, so late messages of the dead worker are lost.
        client = max(self.team.slots) + 1
        self.prepared.note(f"{child} ended ({how_ended(code)}): worker {client} takes its place")
        self.fleet.tell(slot, {"admit": client})
        self._worker(client, slot)

    def _hear(self, event: Event) -> None:
        what = event.what
        match what.get("event"):
            case "measured":
                slot = self.team.slots[event.child.number]
                self.ledger.measured(slot, what["clock"], what["sums"])
            case "clock":
                slot = self.team.slots[event.child.number]
                self.team.deaths[slot] = 0
                self.ledger.clock(slot, what)
            case "applied":
                self.ledger.applied(event.child.number, what)
            case "forwarded":
                self.ledger.forwarded(event.child.number, what["stats"])
            case "gone":
                self.fleet.gone(what)
            case "saved":
                self.saved[what["clock"]] += 1
            case "failed":
                raise RunError(f"{event.child}: {what['error']}")

    def _through(self, state: TrainState, due: set[int]) -> TrainState:
        """Report each clock, save and evaluate after clocks in `due`, and return the last state."""
        hooks, clock = self.prepared.hooks, self.first
        while clock < self.stop:
            while not self.ledger.complete(clock, self.team.done):
                self._hear(self._next(f"clock {clock}"))
                if self.told is not None and self.stop == self.last:
                    self._stop(due)
            step = self.step_of(clock + 1)
            empty = self.ledger.empty
            values, seconds = self.ledger.metrics(clock, step)
            if self.ledger.empty > empty == 0:
                self.prepared.note(
                    f"step {step}: the examples of all workers have weight 0, so the servers take "
                    "no step, and the reported loss is that of the previous step. This message is "
                    "printed once; metrics.jsonl counts such steps (empty_steps)"
                )
            # Until the first clock has ended, the processes start and compile. From now on, the
            # time counts as steps.
            self.prepared.account.switch(Activity.STEP)
            hooks.metrics(step, jnp.asarray(values, jnp.float32), seconds)
            clock += 1
            asked = hooks.due(step)
            if clock in due:
                state = self._boundary(state, clock)
                if hooks.stopped:
                    break
            elif asked and self.stop == self.last:
                self._stop(due)
        return state

    def _boundary(self, state: TrainState, clock: int) -> TrainState:
        while self.saved[clock] < self.cluster.servers:
            self._hear(self._next(f"servers to save clock {clock}"))
        step = self.step_of(clock)
        layouts = self.sharded.layouts
        shards = [read_shard(self.directory, self.sharded, one, clock) for one in layouts]
        state, _ = self.prepared.hooks.boundary(step, self.sharded.whole(shards, state, step))
        self.prepared.record(step, self.ledger.summary())
        prune(self.directory, lambda saved: saved < clock)
        return state

    def _stop(self, due: set[int]) -> None:
        """Stop all processes at a common clock that none of them has passed.

        Args:
          due: the clocks at which servers save their state, to which the common clock is added.
        """
        ahead = 2 + int(AHEAD_SECONDS / max(self.ledger.clock_seconds, 1e-4))
        self.stop = min(self.last, self.ledger.newest + 1 + ahead)
        due.add(self.stop)
        for child in (*self.fleet.servers, *self.team.workers.values()):
            child.say({"stop": self.stop})

    def _end(self) -> None:
        """Terminate all processes, so that no process outlives the run."""
        end_together([*self.team.workers.values()])
        self.fleet.end()
        self.offers.close()
        for forks in self.forks.values():
            forks.close()


def supervise(sharded: Sharded, prepared: Prepared, *, module: str, config: Path) -> TrainState:
    """Train with parameter servers in separate processes, and return the last state.

    Args:
      module, config: the arguments of `Supervisor` with these names.

    Raises:
      RunError: a server or an aggregator died, a worker died again and again, or nothing happened
        for too long.
    """
    processes = sharded.cluster.processes
    (prepared.directory / "order").mkdir(exist_ok=True)
    read_tls(processes.tls)
    with token_file(processes.token) as token:
        read_token(token)
        return Supervisor(sharded, prepared, token, module=module, config=config).run()
