"""The law of the layers: a module imports only from layers below its own, never sideways."""

import ast
from pathlib import Path

import pytest

import jaxdist

ROOT = Path(jaxdist.__file__).parent
LAYERS = (
    ("errors", "trees", "hardware", "environment", "config"),
    ("mesh", "distributed", "compilation_cache", "topology", "hlo"),
    ("sharding", "collectives", "models", "data"),
    ("compression", "optim"),
    ("parallel", "param_server"),
    ("checkpoint", "metrics"),
    ("elastic",),
    ("train",),
    ("experiment",),
    ("planner", "launch", "report", "bench", "doctor", "study"),
    ("cli",),
)
LAYER_OF = {part: number for number, parts in enumerate(LAYERS) for part in parts}
FILES = sorted(ROOT.rglob("*.py"))


def part_of(module: str) -> str | None:
    """`jaxdist.models.gpt` to "models"; None for jaxdist itself and for others' modules."""
    names = module.split(".")
    return names[1] if names[0] == "jaxdist" and len(names) > 1 else None


def imported_parts(file: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {part_of(alias.name) for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module == "jaxdist":
            found |= {alias.name for alias in node.names if alias.name in LAYER_OF}
        elif isinstance(node, ast.ImportFrom):
            found.add(part_of(node.module or ""))
    return {part for part in found if part}


def own_part(file: Path) -> str:
    return file.relative_to(ROOT).parts[0].removesuffix(".py")


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_imports_go_down(file):
    own = own_part(file)
    if own == "__init__":
        return
    assert own in LAYER_OF, f"{own} has no layer: give it one in this test and in the README"
    for part in imported_parts(file) - {own}:
        beside = own == "config" and part == "errors"
        assert LAYER_OF[part] < LAYER_OF[own] or beside or LAYER_OF[own] == 0, (
            f"{file.name} (layer {LAYER_OF[own]}) imports {part} (layer {LAYER_OF[part]})"
        )


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_no_private_jax(file):
    assert "jax._src" not in file.read_text()


def documented_lines(node: ast.AST) -> int:
    """Lines of the docstrings in a node."""
    return sum(
        child.body[0].end_lineno - child.body[0].lineno + 1
        for child in ast.walk(node)
        if isinstance(child, ast.Module | ast.ClassDef | ast.FunctionDef)
        and ast.get_docstring(child) is not None
    )


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_size_budget(file):
    """Files under 450 lines and functions under 80, docstrings not counted (aim: 300 and 40)."""
    text = file.read_text()
    tree = ast.parse(text)
    assert len(text.splitlines()) - documented_lines(tree) < 450
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = node.end_lineno - node.lineno + 1 - documented_lines(node)
            assert length < 80, f"{node.name} has {length} lines"
