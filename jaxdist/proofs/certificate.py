"""The certificate of a proof: its results, its verdict, and the config for which it is valid."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from jaxdist.checkpoint.identity import base_of
from jaxdist.config import Document
from jaxdist.errors import RunError
from jaxdist.experiment import ExperimentConfig, load
from jaxdist.mesh import resolve_sizes
from jaxdist.metrics.report import PACKAGES, plain, write_json
from jaxdist.proofs.numbers import Compared
from jaxdist.proofs.sent import Sent
from jaxdist.proofs.table import proof_lines
from jaxdist.proofs.types.check import Typed
from jaxdist.run.directory import RunDirectory
from jaxdist.run.hooks.contract import Hook, Run
from jaxdist.runtime import environment
from jaxdist.types import Json, JsonObject

ELSEWHERE = ("run", "checkpoint", "metrics", "energy", "elastic", "eval", "mesh")
"""The sections of a config that are not part of a certificate's digest. A certificate states the
mesh in a separate field."""


@dataclass(frozen=True)
class Undecided:
    """A parameter or a comparison about which a proof makes no statement.

    Attributes:
      part: the part of the proof: "types", "numbers" or "bytes".
      what: the name of the parameter or comparison.
      why: the reason why the proof makes no statement.
    """

    part: str
    what: str
    why: str


@dataclass(frozen=True)
class Proof:
    """The results of a proof's three parts.

    Attributes:
      types: the types of the step at its full size. If the step could not be traced, all parameters
        are undecided.
      numbers: the comparisons of the plan with a single device.
      near: the comparisons of the plan's neighbours (see `neighbours`) with a single device.
      sent: the bytes of the compiled step, or an empty `Sent` if `numbers` has no compiled step.
      seed: the seed of the examples' weights and of the choice of neighbours.
      notes: sentences on the settings that the reduced config leaves out or changes.
      reduced: the sections of the reduced config, for which numbers are compared.
      leaves: the names of the parameters.
    """

    types: Typed
    numbers: tuple[Compared, ...]
    near: tuple[Compared, ...] = ()
    sent: Sent = field(default_factory=Sent)
    seed: int = 0
    notes: tuple[str, ...] = ()
    reduced: JsonObject = field(default_factory=dict)
    leaves: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n".join(proof_lines(self))

    @property
    def undecided(self) -> tuple[Undecided, ...]:
        """All parameters and comparisons about which the proof makes no statement."""
        typed = [("types", leaf, "; ".join(why)) for leaf, why in self.types.undecided.items()]
        numbers = [("numbers", one.plan, one.undecided) for one in self.numbers]
        found = (*typed, *numbers, ("bytes", "the step", self.sent.undecided))
        return tuple(Undecided(*one) for one in found if one[-1])

    @property
    def doubted(self) -> bool:
        """Whether findings of types are in doubt, because all compared numbers are right.

        The rules of types may confuse dims of equal size, so that a finding may be a false alarm. A
        plan with a doubted finding is undecided and not proved, since numbers are compared only for
        the reduced config.
        """
        unsure = self.differs or any(one.undecided for one in self.numbers)
        return bool(self.numbers) and not unsure

    @property
    def differs(self) -> bool:
        """Whether any number of the plan or of a neighbour differs from a single device."""
        return any(one.wrong for one in (*self.numbers, *self.near))

    @property
    def verdict(self) -> str:
        """The verdict, which is "wrong", "undecided" or "proved".

        The verdict is "wrong" if any part of the proof found a difference. Otherwise the verdict is
        "undecided" if any parameter or comparison is undecided, or if a finding of types is
        doubted.
        """
        found = self.types.findings
        if self.differs or self.sent.missing or (found and not self.doubted):
            return "wrong"
        return "undecided" if found or self.undecided else "proved"


def to_json(proof: Proof, identity: JsonObject, name: str) -> JsonObject:
    """Return the certificate of a proof as JSON values.

    Args:
      proof: the results of the proof.
      identity: the facts for which the certificate is valid, as `identity` returns them.
      name: the name of the config, or of the proved function.
    """
    return {
        "verdict": proof.verdict,
        "config": name,
        **identity,
        "types": {**asdict(proof.types), "proved": proof.types.proved},
        "numbers": {
            "seed": proof.seed,
            "reduced": proof.reduced,
            "notes": proof.notes,
            "plans": [_compared(one) for one in proof.numbers],
            "neighbours": [_compared(one) for one in proof.near],
        },
        "bytes": asdict(proof.sent),
        "undecided": [asdict(one) for one in proof.undecided],
    }


def _compared(one: Compared) -> JsonObject:
    quantities = [{**asdict(q), **plain({"off": q.off}), "equal": q.equal} for q in one.quantities]
    return {**asdict(one), "quantities": quantities}


_OTHER = {"digest": "another config", "mesh": "another mesh", "versions": "other package versions"}


def identity(text: str, mesh: JsonObject) -> JsonObject:
    """Return the facts for which a certificate is valid: a digest, the mesh, and versions.

    Args:
      text: the text of the config or program, whose SHA-256 digest is part of the result.
      mesh: the size of each mesh axis.
    """
    return {
        "digest": hashlib.sha256(text.encode()).hexdigest(),
        "mesh": mesh,
        "versions": environment.versions(PACKAGES),
    }


def identity_of(config: ExperimentConfig, devices: int) -> JsonObject:
    """Return the facts for which the certificate of a config on `devices` devices is valid.

    The digest leaves out the sections in `ELSEWHERE`, which do not change what a step computes.
    """
    values = config.model_dump(mode="json")
    kept = {name: value for name, value in values.items() if name not in ELSEWHERE}
    sizes = resolve_sizes(config.mesh, config.mesh.fake_devices or devices)
    mesh = {
        axis: size if isinstance(size, int) else size.model_dump(mode="json")
        for axis, size in sizes.items()
    }
    # The keys are sorted, so that the digest does not depend on the order of settings.
    return identity(json.dumps(kept, sort_keys=True), mesh)


def path_of(config: ExperimentConfig, document: Document) -> Path:
    """Return the path of a config's certificate, next to the config's run directory."""
    base = base_of(config.run.directory, document.path or Path("config"))
    return base.with_name(f"{base.name}.{RunDirectory(base).proof.name}")


def write_certificate(path: Path, certificate: JsonObject) -> None:
    """Write a certificate to a JSON file, and create the file's directory if it does not exist.

    Raises:
      RunError: the file cannot be written.
    """
    with suppress(OSError):  # If the directory cannot be created, the write below raises the error.
        path.parent.mkdir(parents=True, exist_ok=True)
    remedy = "choose another directory with run.directory=PATH"
    write_json(path, certificate, what="certificate", remedy=remedy)


class Kept(Hook):
    """A hook that copies a certificate into the directory of a run that starts."""

    def __init__(self, certificate: Path) -> None:
        # The text is read here: the file may be replaced before the run starts.
        self._text = certificate.read_text(encoding="utf-8")

    def start(self, run: Run) -> None:
        """Write the certificate into the run directory."""
        RunDirectory(run.directory).proof.write_text(self._text, encoding="utf-8")


def current(config_file: Path, overrides: Sequence[str], devices: int) -> Kept:
    """Check that a config has a valid certificate, and return the hook that copies it into the run.

    A certificate is valid for the same config, mesh and package versions if its verdict is
    "proved".

    Args:
      config_file: the configuration file, to which `overrides` are applied.
      devices: the number of devices of all processes.

    Raises:
      RunError: there is no certificate; the certificate is for another config, mesh or version than
        the present one; or its verdict is not "proved".
    """
    document, config = load(config_file, overrides)
    path = path_of(config, document)
    command = " ".join(["jaxdist prove", str(config_file), *overrides])
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        why = f"there is no certificate {path}"
    except (OSError, ValueError) as error:
        why = f"cannot read {path} ({error})"
    else:
        found = found if isinstance(found, dict) else {}
        own: Mapping[str, Json] = identity_of(config, devices)
        other = [name for name in own if found.get(name) != own[name]]
        if not other and found.get("verdict") == "proved":
            return Kept(path)
        why = f"{path} says {found.get('verdict')!r}, not 'proved'"
        if other:
            why = f"{path} is a certificate for {' and '.join(_OTHER[name] for name in other)}"
    raise RunError(f"--proved: {why}; run `{command}`, or train without --proved")
