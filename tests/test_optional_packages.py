"""What `pip install jaxdist` brings suffices for every command but those of parameter servers."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions

import pytest
from test_layers import MODULES, ROOT

from jaxdist.cli import shared

REPLAY = "jaxdist.commands.replay"
"""The folder of the command that reads records of servers."""
SERVERS = tuple(
    f"jaxdist.{room}" for room in ("param_server", "wire", "replication", "secure", "tables")
)


def required() -> set[str]:
    """The modules of Python and of the packages that an install without extras brings."""
    project = tomllib.loads((ROOT.parent / "pyproject.toml").read_text())["project"]
    names = {re.split("[<>=]", one)[0].lower() for one in project["dependencies"]}
    found = packages_distributions().items()
    own = {module for module, of in found if names & {one.lower() for one in of}}
    # What jax and pydantic cannot be without.
    return own | {
        *sys.stdlib_module_names,
        "jaxlib",
        "ml_dtypes",
        "annotated_types",
        "pydantic_core",
    }


def at_import(node: ast.AST) -> Iterator[str]:
    """Yield the modules that importing this code imports: no function's, and none for types."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            yield child.module or ""
            yield from (f"{child.module}.{alias.name}" for alias in child.names)
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        elif not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Try):
            yield from at_import(child)


def test_only_parameter_servers_need_more_than_an_install_brings() -> None:
    imports = {name: {*at_import(ast.parse(file.read_text()))} for name, file in MODULES.items()}
    known = required()
    needing = {
        name
        for name, used in imports.items()
        if {one.split(".")[0] for one in used} - known - {"jaxdist"}
    }
    assert needing, "no module imports an optional package: this test sees nothing"
    while more := {name for name, used in imports.items() if used & needing} - needing:
        needing |= more
    others = {name for name in needing if not name.startswith(SERVERS)}
    assert {name.rpartition(".")[0] for name in others} == {REPLAY}


@pytest.mark.parametrize("name", ["grpc", "google_crc32c"])
def test_a_command_that_needs_them_says_what_to_install(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert shared.print_error(ModuleNotFoundError(f"No module named {name!r}", name=name)) == 3
    assert "pip install 'jaxdist[param-server]'" in capsys.readouterr().err
