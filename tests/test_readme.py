"""The README's Python runs as it is written, on eight devices."""

import re
from pathlib import Path

import jax
import numpy as np
import pytest

README = (Path(__file__).parent.parent / "README.md").read_text()
INDENTED = re.compile(r"(?:^(?:    .*)?\n)+", re.MULTILINE)


def examples():
    """Indented blocks that begin with an import, without their indent."""
    blocks = [re.sub("^    ", "", block, flags=re.M).strip() for block in INDENTED.findall(README)]
    return [block for block in blocks if block.startswith(("from ", "import "))]


COLLECTIVES = next(block for block in examples() if "jax.shard_map" in block)


def test_collectives_in_a_shard_map_of_ones_own(capsys):
    found = {}
    exec(COLLECTIVES, found)
    shapes = jax.tree.map(np.shape, (found["means"], found["whole"]))
    assert shapes == ({"w": (2, 4)}, [(8, 4), (4, 8)])
    assert (np.asarray(found["means"]["w"]) == 4).all()
    assert all((np.asarray(leaf) == 1).all() for leaf in found["whole"])
    assert "hierarchical" in capsys.readouterr().out


@pytest.mark.parametrize("block", examples(), ids=lambda block: block.splitlines()[0])
def test_what_is_imported_exists(block):
    names = [line for line in block.splitlines() if re.match("from jaxdist.* import ", line)]
    exec("\n".join(names), {})
