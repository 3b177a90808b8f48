"""A file in the working directory is never imported in place of a module of Python's own."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

import jaxdist
from jaxdist.runtime.environment import python_module

FILES = sorted(Path(jaxdist.__file__).parent.rglob("*.py"))


def unsafe(source: str) -> list[str]:
    """The commands in a source that start Python with the working directory on its path."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.List | ast.Tuple):
            continue
        values = [one.value if isinstance(one, ast.Constant) else None for one in node.elts]
        for at, value in enumerate(values):
            starts = value in ("-m", "-c") and not {"-P", "-I"} & set(values[:at])
            if starts and not {"torch", "bash"} & set(re.findall(r"\w+", ast.unparse(node))):
                found.append(f"line {node.lineno}: {ast.unparse(node)}")
    return found


@pytest.mark.parametrize("line", ["[sys.executable, '-m', name]", "('-m', 'jaxdist.cli')"])
def test_a_child_that_would_see_the_working_directory_is_found(line):
    assert unsafe(f"command = {line}")
    assert not unsafe("command = [sys.executable, '-P', '-m', name]")


@pytest.mark.full
def test_no_process_is_started_with_the_working_directory_on_its_path():
    bench = {path for path in FILES if path.name == "startup.py"}  # times `import jax` as it is
    found = {str(p): lines for p in FILES if p not in bench and (lines := unsafe(p.read_text()))}
    assert not found


def test_a_file_named_as_a_module_of_python_is_not_imported(tmp_path):
    (tmp_path / "random.py").write_text("raise RuntimeError('shadowed')")
    command = python_module("this")
    (tmp_path / "this.py").write_text("import random")
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, "Zen of Python" in done.stdout) == (0, True), done.stderr
