"""A host's membership, which is a thread that requests leases and takes part in the election.

The agent manages the processes of the host. An answer may end the host's generation; the thread
accepts such an answer only after the agent has reported that the host's processes are gone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from jaxdist.elastic.hosts.leader_election import (
    LeaderElection,
    boot_clock,
    decode_answer,
    encode_renewal,
)
from jaxdist.elastic.hosts.rendezvous.contract import LostError, Rendezvous, RendezvousError, Token
from jaxdist.elastic.hosts.run import OVER, ended_before
from jaxdist.elastic.membership import Generation, Host
from jaxdist.heartbeat.config import MembershipConfig
from jaxdist.types import Json, JsonObject

BEAT_SECONDS, BEAT_LEASES = 0.5, 0.05
KILL_LEASES = 0.1
"""The fraction of a lease that must be left so that a host's processes may continue. If less is
left, the processes are killed."""


class Membership:
    """The membership of this host, from a call of `begin` to a call of `close`.

    Attributes:
      facts: the facts that this host publishes about itself; see `tell`.
      over: the result of the run, with the keys `generation`, `code` and `words`. The value is None
        during the run.
      name: the name of the rendezvous, which was drawn at random when the rendezvous was created.
      trouble: the error of a rendezvous that does not answer, or None while the rendezvous answers.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        config: MembershipConfig,
        own: str,
        election: LeaderElection,
        clock: Callable[[], float] = boot_clock,
    ) -> None:
        self.rendezvous, self.config, self.own, self.election = rendezvous, config, own, election
        self.clock = clock
        self.facts: JsonObject = {}
        self.over: JsonObject | None = None
        self.trouble: RendezvousError | None = None
        self._host = Host(own)
        self._number = 0
        self._working: Generation | None = None
        self._ends = ""
        self._before = -1
        self.name = ""
        self._lock = threading.Lock()
        self._saying = threading.Lock()
        self._wake, self._closed = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._live, name="membership", daemon=True)

    def begin(self) -> None:
        """Send the host's first request for a lease, and start the thread.

        Raises:
          RendezvousError: the rendezvous cannot be reached.
        """
        self._before = ended_before(self.rendezvous)
        self.name = Token.parse(self.rendezvous.token()).name
        self.turn()
        self._thread.start()

    @property
    def beat_seconds(self) -> float:
        """The time between two messages of this host to the rendezvous, in seconds."""
        # A host sends many messages for each lease, so that it keeps the lease if a few messages
        # are lost.
        return min(BEAT_SECONDS, BEAT_LEASES * self.config.lease_seconds)

    @property
    def ended_before(self) -> int:
        """The generation in which this rendezvous's last run ended, or -1 if no run has ended."""
        return self._before

    def take(self) -> Generation | None:
        """Enter the current generation and return it, or None if this host has no valid lease."""
        with self._lock:
            assert self._working is None, "the generation before is released first"
            found = self._host.at_work(self._soon())
            self._working, self._ends = found, ""
            return found

    def ends(self) -> str | None:
        """Return why this host's processes must end now, or None while they may continue."""
        with self._lock:
            if self._working is None or self._ends:
                return self._ends or "this host has no generation"
            if self._host.at_work(self._soon()) != self._working:
                return "the lease of this host expired"
            return None

    @property
    def pauses(self) -> bool:
        """Whether the processes of this host have to save and stop, so that more hosts can join."""
        with self._lock:
            return self._working is not None and (
                self._host.pauses and self._host.generation == self._working
            )

    @property
    def quarantined_seconds(self) -> float:
        """The remaining seconds for which this host asks to be left out, or 0 without a request."""
        with self._lock:
            return max(self._host.quarantined_until - self.clock(), 0.0)

    def release(self, *, stuck: bool = False) -> None:
        """Report that the processes of this host are gone.

        Args:
          stuck: whether a process was stuck. After a stuck process, this host asks to be left out
            for a while.
        """
        with self._lock:
            if stuck:
                self._host = self._host.was_stuck(self.config, self.clock())
            working, self._working, self._ends = self._working, None, ""
            if working is not None:
                self._host = self._host.stop(working.number + 1)
        self._wake.set()

    def tell(self, **facts: Json) -> None:
        """Publish facts about this host at once."""
        self.note(**facts)
        self._wake.set()

    def note(self, **facts: Json) -> None:
        """Publish facts about this host with its next message."""
        with self._lock:
            self.facts = {**self.facts, **facts}

    def say(self, *, leaves: bool = False) -> None:
        """Send a request for a lease at once.

        Args:
          leaves: whether the request is the last message of a host that leaves.

        Raises:
          RendezvousError: the rendezvous cannot be reached.
        """
        with self._saying:  # Messages must be written in the order of their numbers.
            with self._lock:
                self._number += 1
                message = self._host.renew(self.clock(), leaves=leaves)
                told = encode_renewal(message, self._number, self.facts)
            self.rendezvous.put(f"host/{self.own}", told)

    def others(self) -> Mapping[str, Any]:
        """Return the last message of each host, this host included, by the host's name."""
        return dict(self.rendezvous.values("host"))

    def finish(self, generation: int, code: int, words: str = "", **more: Json) -> None:
        """Announce to all hosts that the run is over.

        Args:
          generation: the last generation of the run.
          code: the exit code of the run.
          words: the error with which the run failed, or an empty string.
          more: the other values to announce, by name.
        """
        told = {"generation": generation, "code": code, "words": words, **more}
        self.over = self.over or told
        self.rendezvous.put(OVER, told)

    def turn(self) -> None:
        """Send a request, take part in the election, and read the answer."""
        # The name is checked first, because this host must not become the leader of a rendezvous
        # that other hosts have recreated: this host's compatibility contains the name of the old
        # rendezvous.
        self._check_name()
        self.say()
        self.election.turn()
        # The name is checked again, because the rendezvous may have been recreated during the
        # election.
        self._check_name()
        told = self.rendezvous.get(f"answer/{self.own}")
        # The result of the run is read after the answer, since the end of the run may be the reason
        # for the answer.
        over = self.rendezvous.get(OVER)
        if over is not None and over["generation"] > self._before:
            self.over = over
        if told is not None:
            with self._lock:
                self._hear(told)

    def _hear(self, told: Mapping[str, Any]) -> None:
        heard = self._host.hear(self.config, decode_answer(told))
        if self._working is None or heard.generation == self._working:
            self._host = heard
        elif not self._ends:
            self._ends = "a host was lost or has joined"

    def _check_name(self) -> None:
        if Token.parse(self.rendezvous.token()).name != self.name:
            raise LostError(self.rendezvous.address)

    def _soon(self) -> float:
        return self.clock() + KILL_LEASES * self.config.lease_seconds

    def _live(self) -> None:
        while not self._closed.is_set():
            self._wake.wait(self.beat_seconds)
            self._wake.clear()
            try:
                self.turn()
                self.trouble = None
            except RendezvousError as error:
                self.trouble = error
            except (ValueError, KeyError, TypeError) as error:
                self.trouble = RendezvousError(
                    f"the rendezvous {self.rendezvous.address} contains data that agents did not "
                    f"write ({error!r}): stop all agents and choose an empty rendezvous"
                )

    def close(self) -> None:
        """Leave the run, so that the other hosts need not wait until this host's lease expires."""
        self._closed.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()
        self.release()
        # If the rendezvous does not answer, the lease of this host expires by itself.
        with suppress(RendezvousError):
            self.say(leaves=True)
            self.election.turn()
            self.election.resign()
