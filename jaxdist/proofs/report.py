"""`jaxdist prove`: the proof of a config's plan, as a table and as a certificate."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import jax
from rich.console import Console

from jaxdist.experiment import build, load
from jaxdist.metrics.report import write_json
from jaxdist.proofs.certificate import Proof, identity_of, path_of, to_json, write
from jaxdist.proofs.prove import prove as prove_experiment

NEAR = 2
"""The number of neighbours to compare by default."""


def prove(
    path: Path,
    overrides: Sequence[str] = (),
    *,
    near: int = NEAR,
    seed: int = 0,
    json_file: Path | None = None,
    console: Console,
) -> Proof:
    """Prove that a config's plan computes what one device would, and print and write the results.

    Args:
      path: the configuration file, to which `overrides` are applied.
      near: number of neighbours to compare.
      seed: seed of weights and neighbours.
      json_file: a second file for the certificate, in addition to that which `train --proved`
        reads.
      console: the console for the table.

    Raises:
      JaxdistError: any error that the user can fix.
    """
    document, config = load(path, overrides)
    devices = jax.devices()[: config.mesh.fake_devices]
    experiment = build(config, document, devices=devices)
    name = " ".join([str(path), *overrides])
    say = partial(console.print, soft_wrap=True, markup=False)
    say(f"proof of {name}, seed {seed}")
    proof = prove_experiment(experiment, near=near, seed=seed, say=say)
    say(str(proof))
    certificate = to_json(proof, identity_of(config, len(devices)), name)
    file = path_of(config, document)
    write(file, certificate)
    if json_file is not None:
        write_json(json_file, certificate, what="certificate")
    say(f"{proof.verdict}: {file}")
    return proof
