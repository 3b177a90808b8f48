"""Readers of the examples in README and docs: fenced blocks and commands."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^( *)```(\w+)\n(.*?)^\1```$", re.M | re.S)
SPAN = re.compile(r"`(jaxdist [^`]+)`")
INDENTED = re.compile(r"^    ((?:\S.* && )?jaxdist .+)$", re.M)


def blocks(page: Path, language: str) -> list[str]:
    """Return the fenced blocks of a page in a language, in the order of the page."""
    return [body for _, name, body in FENCE.findall(page.read_text()) if name == language]


def commands(page: Path) -> list[str]:
    """Return the command lines of a page that begin with `jaxdist`, in blocks and in sentences."""
    text = page.read_text()
    lines = [line for block in blocks(page, "sh") for line in block.splitlines()]
    prompts = [line for block in blocks(page, "console") for line in block.splitlines()]
    lines += [line.removeprefix("$ ") for line in prompts if line.startswith("$ ")]
    prose = FENCE.sub("", text)
    spans = [" ".join(span.split()) for span in SPAN.findall(prose)]
    indented = [line.rpartition("&& ")[2] for line in INDENTED.findall(prose)]
    return [line for line in (*lines, *spans, *indented) if line.startswith("jaxdist ")]


def ids(page: Path) -> str:
    return str(page.relative_to(ROOT))
