"""The law of the layers: a module imports only from layers below its own, never sideways."""

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path

import jaxdist

ROOT = Path(jaxdist.__file__).parent
LAYERS = (
    ("errors", "types", "trees", "jaxprs", "permute", "columns", "runtime", "config"),
    ("mesh", "hlo"),
    ("cost", "pipeline_schedules"),
    ("sharding", "collectives", "models", "data"),
    ("compression", "optim"),
    ("validity", "experimental"),
    ("wire", "secure"),
    ("parallel", "param_server"),
    ("replication",),
    ("tables",),
    ("checkpoint", "metrics"),
    ("heartbeat",),
    ("train",),
    ("param_server.training",),
    ("tables.training",),
    ("experiment",),
    ("interchange",),
    ("param_server.processes",),
    ("run",),
    ("elastic",),
    ("inspect", "parity", "commands", "doctor", "study"),
    ("audit", "launch", "planner", "proofs", "simulation"),
    ("cli",),
    ("__main__",),
)
MOST_FILES = 16
"""Of a folder, `__init__.py` counted."""
MOST_LINES = 8_000
"""Of a room, with all its folders."""
LAYER_OF = {part: number for number, parts in enumerate(LAYERS) for part in parts}
BENCHMARKS = ROOT.parent / "benchmarks"
"""In a checkout, not in the wheel."""
FILES = sorted(ROOT.rglob("*.py"))
WITH_BENCHMARKS = [*FILES, *sorted(BENCHMARKS.rglob("*.py"))]
MODULES = {
    ".".join(file.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__"): file
    for file in FILES
}
_NAMED = re.compile(r"(jaxdist(?:\.\w+)+)(?::[\w.]+)?")
_STARTED = re.compile(r"-m (jaxdist(?:\.\w+)*)")


def part_of(module: str) -> str | None:
    """`jaxdist.models.gpt` to "models", and a module of a sub-room that has a layer of its own to
    that sub-room; None for jaxdist itself and for others' modules."""
    names = module.split(".")
    if names[0] != "jaxdist" or len(names) == 1:
        return None
    inner = ".".join(names[1:3])
    return inner if inner in LAYER_OF else names[1]


@cache
def used_modules(source: str) -> frozenset[str]:
    """Return what a source imports of jaxdist, at its head or inside a function, and the modules
    that its strings name: it starts them, or imports them by name. Docstrings do not count.

    Where a name is imported from a module, both `module` and `module.name` are returned, since the
    name may be a module too.
    """
    nodes = [*ast.walk(ast.parse(source))]
    used = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            used |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            used.add(node.module or "")
            used |= {f"{node.module}.{alias.name}" for alias in node.names}
    used |= started_modules(nodes)
    return frozenset(one for one in used if one.split(".")[0] == "jaxdist")


def started_modules(nodes: Sequence[ast.AST]) -> set[str]:
    """Modules that strings name: `"jaxdist.x"`, `"jaxdist.x:name"`, `"-m", "jaxdist"`."""
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    started = set()
    for node in nodes:
        if isinstance(node, ast.List | ast.Tuple | ast.Call):
            words = node.args if isinstance(node, ast.Call) else node.elts
            texts = [one.value if isinstance(one, ast.Constant) else None for one in words]
            if ("-m", "jaxdist") in pairwise(texts):
                started.add("jaxdist.__main__")
        if not isinstance(node, ast.Constant) or id(node) in docstrings:
            continue
        text = node.value
        if isinstance(text, str):
            named = _NAMED.fullmatch(text)
            started |= {named[1]} if named else set()
            run = _STARTED.findall(text)
            started |= {one if "." in one else f"{one}.__main__" for one in run}
    return started


def test_module_names_in_strings_are_read():
    source = '''
"""Not jaxdist.audit, a docstring."""
"jaxdist.audit"
MODULE = "jaxdist.cli.fork_server"
program = ["python", "-P", "-m", "jaxdist", "train"]
run("python -m jaxdist.study CONFIG")
path = "jaxdist.parity.trace:Trace"
said = "see jaxdist.hlo.ledger for more"
def later():
    from jaxdist.run import fit
'''
    assert used_modules(source) == {
        "jaxdist.cli.fork_server",
        "jaxdist.__main__",
        "jaxdist.study",
        "jaxdist.parity.trace",
        "jaxdist.run",
        "jaxdist.run.fit",
    }


def used_parts(file: Path) -> set[str]:
    """The rooms and sub-rooms with a layer that a file uses."""
    parts = {part_of(module) for module in used_modules(file.read_text())}
    return {part for part in parts if part in LAYER_OF}


def own_part(file: Path) -> str:
    path = file.relative_to(ROOT).with_suffix("")
    return part_of(".".join(("jaxdist", *path.parts))) or ""


def test_imports_go_down():
    """Modules that are started, and named in strings, are used as those that are imported are."""
    wrong = []
    for file in FILES:
        own = own_part(file)
        if own == "__init__":
            continue
        assert own in LAYER_OF, f"{own} has no layer: give it one here and in docs/concepts.md"
        for part in used_parts(file) - {own}:
            sideways = LAYER_OF[part] == LAYER_OF[own] != 0
            if LAYER_OF[part] > LAYER_OF[own] or sideways:
                wrong.append(f"{file} (layer {LAYER_OF[own]}) uses {part} ({LAYER_OF[part]})")
    assert not wrong, "\n".join(wrong)


def folder_edges(sources: Mapping[str, str]) -> dict[str, dict[str, set[str]]]:
    """By folder, which of its entries (folders, files) use which others; by dotted names.

    Args:
      sources: text by module.
    """
    edges: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for module, text in sources.items():
        own = module.split(".")
        for used in used_modules(text) & sources.keys():
            other = used.split(".")
            for depth, (ours, theirs) in enumerate(zip(own, other, strict=False)):
                if ours != theirs:
                    edges[".".join(own[:depth])][ours].add(theirs)
                    break
    return edges


def reached(uses: Mapping[str, set[str]], start: str) -> set[str]:
    """All entries that one uses, directly or through others."""
    found: set[str] = set()
    left = [start]
    while left:
        fresh = uses.get(left.pop(), set()) - found
        found |= fresh
        left += fresh
    return found


def circles(sources: Mapping[str, str]) -> set[tuple[str, ...]]:
    """Groups of sub-folders of one folder that use each other, also by way of files beside them."""
    found = set()
    for folder, uses in folder_edges(sources).items():
        if folder == "jaxdist":  # the layers
            continue
        reach = {entry: reached(uses, entry) for entry in uses}
        for entry in uses:
            circle = {other for other in reach[entry] if entry in reach.get(other, ())}
            folders = sorted(
                one for one in circle if any(m.startswith(f"{folder}.{one}.") for m in sources)
            )
            if len(folders) > 1:
                found.add((folder, *folders))
    return found


def test_circles_of_sub_folders_are_seen():
    sources = {
        "jaxdist.x.a.one": "def later():\n    from jaxdist.x import between",
        "jaxdist.x.between": "from jaxdist.x.b.two import f",
        "jaxdist.x.b.two": "MODULE = 'jaxdist.x.a.one'",
        "jaxdist.x.b.three": "from jaxdist.x.b.two import f",
    }
    assert circles(sources) == {("jaxdist.x", "a", "b")}


def test_sub_folders_have_an_order_too():
    """Imports inside of functions count, and those for types alone, and names in strings."""
    assert not circles({module: file.read_text() for module, file in MODULES.items()})


def test_the_core_imports_nothing_experimental():
    """But for the one place that lists a config's alternatives."""
    importing = {
        file.relative_to(ROOT).as_posix()
        for file in FILES
        if re.search(r"(from|import) jaxdist\.experimental", file.read_text())
        and file.parent.name != "experimental"
    }
    assert importing == {"experiment/config.py"}


def test_only_commands_import_benchmarks():
    """The wheel lacks them."""
    importing = [file for file in FILES if re.search(r"(from|import) benchmarks", file.read_text())]
    assert importing == [ROOT / "cli" / "measurement.py", ROOT / "cli" / "programs.py"]


def test_only_the_command_imports_the_simulation():
    """Runs, and all that they are made of, take nothing from what plays them."""
    importing = [
        file
        for file in FILES
        if "simulation" in used_parts(file) and own_part(file) != "simulation"
    ]
    assert importing == [ROOT / "cli" / "measurement.py"]


def test_only_commands_start_agents():
    """A run may not even name what starts it; both import `heartbeat`."""
    importing = {own_part(file) for file in FILES if "elastic" in used_parts(file)}
    assert importing == {"elastic", "commands", "cli"}


def test_no_private_jax():
    assert not [file for file in WITH_BENCHMARKS if "jax._src" in file.read_text()]


def test_a_folder_is_seen_at_one_look():
    counts = Counter(file.parent for file in WITH_BENCHMARKS)
    assert not {str(folder): count for folder, count in counts.items() if count > MOST_FILES}


def test_a_room_is_not_too_large():
    """What exceeds it holds two rooms; `LAYERS` says between which others the new one lies."""
    lines = Counter()
    for file in FILES:
        lines[file.relative_to(ROOT).parts[0]] += len(file.read_text().splitlines())
    assert not {room: count for room, count in lines.items() if count > MOST_LINES}


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
        length = len(text.splitlines())
        if length < 80:
            continue
        tree = ast.parse(text)
        if length >= 450 and length - documented_lines(tree) >= 450:
            wrong.append(str(file))
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = node.end_lineno - node.lineno + 1
                if lines >= 80 and lines - documented_lines(node) >= 80:
                    wrong.append(f"{file}: {node.name}")
    assert not wrong, "\n".join(wrong)
