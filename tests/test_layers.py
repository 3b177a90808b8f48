"""The law of the layers: a module imports only from layers below its own, never sideways."""

import ast
import re
from collections import Counter
from pathlib import Path

import jaxdist

ROOT = Path(jaxdist.__file__).parent
MODULE = re.compile(r"jaxdist(\.[a-z_]+)+")
LAYERS = (
    ("errors", "types", "trees", "runtime", "config"),
    ("mesh", "hlo"),
    ("cost", "pipeline_schedules"),
    ("sharding", "collectives", "models", "data"),
    ("compression", "optim"),
    ("parallel", "param_server"),
    ("checkpoint", "metrics"),
    ("heartbeat",),
    ("train",),
    ("param_server.training",),
    ("experiment",),
    ("param_server.processes",),
    ("run",),
    ("elastic",),
    ("inspect", "parity", "commands", "doctor", "study"),
    ("audit", "launch", "planner", "simulation"),
    ("cli",),
    ("__main__",),
)
MOST_FILES = 16
"""Of a folder, `__init__.py` counted."""
LAYER_OF = {part: number for number, parts in enumerate(LAYERS) for part in parts}
BENCHMARKS = ROOT.parent / "benchmarks"
"""In a checkout, not in the wheel."""
FILES = sorted(ROOT.rglob("*.py"))
WITH_BENCHMARKS = [*FILES, *sorted(BENCHMARKS.rglob("*.py"))]


def part_of(module: str) -> str | None:
    """`jaxdist.models.gpt` to "models", and a module of a sub-room that has a layer of its own to
    that sub-room; None for jaxdist itself and for others' modules."""
    names = module.split(".")
    if names[0] != "jaxdist" or len(names) == 1:
        return None
    inner = ".".join(names[1:3])
    return inner if inner in LAYER_OF else names[1]


def imported_modules(file: Path) -> set[str]:
    """The modules that a file imports, or names in a string to start them with `python -m`.

    The command line may be started from anywhere, as a user starts it.
    """
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            started = MODULE.fullmatch(node.value) and part_of(node.value) != "cli"
            found |= {node.value} if started else set()
    return found


def imported_parts(file: Path) -> set[str]:
    parts = {part_of(module) for module in imported_modules(file)}
    return {part for part in parts if part in LAYER_OF}


def own_part(file: Path) -> str:
    path = file.relative_to(ROOT).with_suffix("")
    return part_of(".".join(("jaxdist", *path.parts))) or ""


def test_imports_go_down():
    wrong = []
    for file in FILES:
        own = own_part(file)
        if own == "__init__":
            continue
        assert own in LAYER_OF, f"{own} has no layer: give it one in this test and in the README"
        for part in imported_parts(file) - {own}:
            if LAYER_OF[part] >= LAYER_OF[own] and LAYER_OF[own] != 0:
                wrong.append(f"{file} (layer {LAYER_OF[own]}) imports {part} ({LAYER_OF[part]})")
    assert not wrong, "\n".join(wrong)


def test_only_the_command_imports_benchmarks():
    """The wheel lacks them."""
    importing = [file for file in FILES if re.search(r"(from|import) benchmarks", file.read_text())]
    assert importing == [ROOT / "cli" / "measurement.py"]


def test_only_the_command_imports_the_simulation():
    """Runs, and all that they are made of, take nothing from what plays them."""
    importing = [
        file
        for file in FILES
        if "simulation" in imported_parts(file) and own_part(file) != "simulation"
    ]
    assert importing == [ROOT / "cli" / "measurement.py"]


def test_no_private_jax():
    assert not [file for file in WITH_BENCHMARKS if "jax._src" in file.read_text()]


def test_a_folder_is_seen_at_one_look():
    counts = Counter(file.parent for file in WITH_BENCHMARKS)
    assert not {str(folder): count for folder, count in counts.items() if count > MOST_FILES}


def test_files_of_tests_have_names_of_their_own():
    """Pytest imports them by name alone, and would take two of one name for the same."""
    counts = Counter(file.name for file in Path(__file__).parent.rglob("test_*.py"))
    assert not [name for name, count in counts.items() if count > 1]


def documented_lines(node: ast.AST) -> int:
    """Lines of the docstrings in a node."""
    return sum(
        child.body[0].end_lineno - child.body[0].lineno + 1
        for child in ast.walk(node)
        if isinstance(child, ast.Module | ast.ClassDef | ast.FunctionDef)
        and ast.get_docstring(child) is not None
    )


def test_size_budget():
    """Files under 450 lines and functions under 80, docstrings not counted (aim: 300 and 40)."""
    wrong = []
    for file in WITH_BENCHMARKS:
        text = file.read_text()
        tree = ast.parse(text)
        if len(text.splitlines()) - documented_lines(tree) >= 450:
            wrong.append(str(file))
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if node.end_lineno - node.lineno + 1 - documented_lines(node) >= 80:
                wrong.append(f"{file}: {node.name}")
    assert not wrong, "\n".join(wrong)
