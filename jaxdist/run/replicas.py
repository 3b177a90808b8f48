"""A hook that compares replicas between steps, before anything is measured or saved."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jaxdist.checkpoint.agree import any_process, gather_json
from jaxdist.checkpoint.store import CheckpointStore
from jaxdist.metrics.account import Account, Activity
from jaxdist.metrics.writer import REPLICAS, Records
from jaxdist.run.hooks.loop import Moment, RegularHook
from jaxdist.run.suspect import SuspectStateError
from jaxdist.train.digest import ReplicaDifference, Replicas
from jaxdist.train.replicas import ReplicaCheckConfig

_LISTED = 3


@dataclass
class CompareReplicas(RegularHook):
    """A hook that raises an error if replicas of a run's state differ.

    The hook compares replicas whenever any hook is due, so that each state is compared before later
    hooks evaluate or save it.

    Attributes:
      store: the store of checkpoints. Its newest checkpoint is the last state whose replicas were
        equal.
    """

    settings: ReplicaCheckConfig
    replicas: Replicas
    store: CheckpointStore
    writer: Records
    account: Account

    def __post_init__(self) -> None:
        self._digests = self.account.first(Activity.COMPILE, self.replicas.digests)

    def at(self, moment: Moment) -> None:
        with self.account.within(Activity.REPLICA_CHECK):
            digests = np.asarray(self._digests(moment.state))
            found = self.replicas.differences(digests)
            # All processes must raise the error together, even if only some of them received
            # different digests.
            differ = any_process(bool(found))
        if differ:
            self._end(moment.step, found)

    def _end(self, step: int, found: Sequence[ReplicaDifference]) -> None:
        """Record the differences as metrics, and raise a `SuspectStateError`.

        Args:
          step: the step after which replicas were compared.
          found: the differences.
        """
        hosts = dict(enumerate(gather_json(socket.gethostname())))
        what = told(found, hosts)
        self.store.wait()
        saved = self.store.steps()
        self.writer.write(step, numbers(found), split=REPLICAS)
        last = (
            f"from checkpoint {saved[-1]}" if saved else "from step 0, since there is no checkpoint"
        )
        raise SuspectStateError(
            f"replicas differ at step {step}: {what}",
            f"--resume continues {last}; remove a device that is named more than once",
            max_restores=self.settings.restores,
        )


def told(found: Sequence[ReplicaDifference], hosts: Mapping[int, str]) -> str:
    """Return a line, for the user, about the differences between replicas.

    Args:
      found: the differences, which may be empty if only another process has found differences.
      hosts: the names of hosts, by process number.

    >>> told([], {})
    'processes received different digests, so a device or the network is faulty'
    """
    if not found:
        return "processes received different digests, so a device or the network is faulty"
    more = [f"{len(found) - _LISTED} more shards differ"] if len(found) > _LISTED else []
    return "; ".join([*(one.told(hosts) for one in found[:_LISTED]), *more])


def numbers(found: Sequence[ReplicaDifference]) -> dict[str, float]:
    """Return the differences as a record of metrics.

    If a single device explains all differences, the record names this device.
    """
    odd = {device for one in found for device in one.odd}
    undecided = sum(not one.odd for one in found)
    values: dict[str, float] = {
        "differing_shards": len(found),
        "differing_devices": len(odd),
        "undecided_shards": undecided,
    }
    if len(odd) == 1 and not undecided:
        (device,) = odd
        values |= {"device": device.id, "process": device.process_index}
    return values
