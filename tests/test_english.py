"""Docstrings, comments and messages are plain sentences, not shorthand."""

import ast
import io
import re
import tokenize
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from documents import ROOT

PACKAGE = ROOT / "jaxdist"

ROOMS = sorted(
    path.stem
    for path in PACKAGE.iterdir()
    if path.suffix == ".py" or (path / "__init__.py").exists()
)

# How a docstring never begins, and an entry of `Args:` or `Attributes:`: with a clause that lacks
# its noun.
BEGINNING = re.compile(r"(Of|Who|Whom|Whose|What|Whatever|One|So|As it|Where|How)\b")
ENTRY = re.compile(r"^ +[\w*]+(, [\w*]+)*: (as )?of\b", re.MULTILINE)

# Words in place of which the field has its own: again, reported, continues, instead of ...
WORDS = (
    r"\banew\b",
    r"\b(told|said)\b",
    r"\blies\b",
    r"\b(goes|go|went|going) on\b",
    r"\bso (many|much)\b",
    r"(?<!soon )\bas (it is|they are)\b",
    r"\b(stands?|stood)\b(?!-in)",
    r"\b(plays|rightly)\b",
    r"\bbeside\b",
    r"\b(whoever|nobody|somebody)\b",
    r"(?<!there )(?<!There )\b(is|are) no (?!longer|such)",
    r"\b(the|newest|first|last|other|own|old|new|next|same|earlier|later|better|best) one\b(?!-)",
    r"(?<!of )\bones\b",
    r"; None (for|if|where|without|until|while|in|on|is)\b",
    r"; empty (for|if|where|without|when)\b",
    r", see ``",
    r"\b(mostly|also (if|when|where))\b",
)
WORD = re.compile("|".join(WORDS), re.IGNORECASE)


# A string of several words is a message; a list of names, a script and a template are none.
PROSE = re.compile(r"\b[A-Za-z]{2,}\b(?= )")
SENTENCE = re.compile(r"(?<=[.?!])\s+|\n")
MOST_WORDS = 35
SCRIPTS = ("proofs/types/elementwise.py", "doctor/facts.py", "runtime/gpu_query.py")


def files(room: str) -> list[Path]:
    return sorted((PACKAGE / room).rglob("*.py")) or [PACKAGE / f"{room}.py"]


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and text of docstrings, and of the strings that describe attributes and settings."""
    for node in ast.walk(tree):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield node.lineno, text


def parts(node: ast.AST) -> Iterator[str]:
    """The text of a string as it is written, with `{}` for each value that is put into it."""
    match node:
        case ast.Constant(value=str(text)):
            yield text
        case ast.JoinedStr(values=values):
            yield "".join(v.value if isinstance(v, ast.Constant) else "{}" for v in values)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            sides = ["".join(parts(side)) for side in (left, right)]
            if any(sides):
                yield "".join(side or "{}" for side in sides)


def messages(node: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and text of the strings that a user may read: errors, notices, help, tables."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return
    text = "".join(parts(node))
    if len(PROSE.findall(text)) > 3 and isinstance(node, ast.expr):
        yield node.lineno, text
    if not text:
        for child in ast.iter_child_nodes(node):
            yield from messages(child)


def comments(text: str) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def prose(text: str) -> str:
    """The text without code: backticks, doctests with their results, and names of arguments."""
    text = re.sub(r"^ *>>>(.*\n)+?(?= *$)", "", f"{text}\n", flags=re.MULTILINE)
    text = re.sub(r"^ +[\w*]+(, [\w*]+)*:(?! (as )?of\b)", "", text, flags=re.MULTILINE)
    return re.sub(r"`[^`]*`", "``", text)


def faults_of(message: str) -> Iterator[str]:
    for sentence in SENTENCE.split(message):
        if (count := len(sentence.split())) > MOST_WORDS:
            yield f"has a sentence of {count} words"
    for found in WORD.finditer(prose(message)):
        yield f"has {found[0]!r}"


def faults(path: Path) -> Iterator[str]:
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    for line, string in docstrings(tree):
        if found := BEGINNING.match(string):
            yield f"{path.relative_to(ROOT)}:{line} begins with {found[0]!r}"
        for pattern in (ENTRY, WORD):
            for found in pattern.finditer(prose(string)):
                yield f"{path.relative_to(ROOT)}:{line} has {found[0].strip()!r}"
    scripts = any(path.match(name) for name in SCRIPTS)
    for line, message in () if scripts else messages(tree):
        yield from (f"{path.relative_to(ROOT)}:{line} {fault}" for fault in faults_of(message))
    for line, comment in comments(text):
        for found in WORD.finditer(prose(comment)):
            yield f"{path.relative_to(ROOT)}:{line} has {found[0]!r}"


@pytest.mark.parametrize("room", ROOMS)
def test_docstrings_and_messages_are_plain_sentences(room):
    assert files(room)[0].exists()
    found = [fault for path in files(room) for fault in faults(path)]
    assert not found, "\n".join(found)


def test_the_refused_combinations_are_plain_sentences():
    table = tomllib.loads((PACKAGE / "validity/table.toml").read_text(encoding="utf-8"))
    texts = [row[half] for row in table["rows"] for half in ("why", "instead")]
    assert not [(fault, text) for text in texts for fault in faults_of(text)]


def test_the_rules_see_what_they_are_for(tmp_path, monkeypatch):
    """Each rule has a sentence that breaks it; code, and the right words, break none."""
    path = tmp_path / "module.py"
    path.write_text(
        '"""What a device holds."""\n'
        "seed: int\n"
        '"""Of parameters and data order."""\n'
        "def f():\n"
        '    """Find it.\n\n'
        "    Args:\n      axis: of the mesh.\n\n"
        '    >>> "goes on, told anew"\n    \'so many\'\n    """\n'
        "    # The newest one goes on, as `told` says.\n"
        "# All else: there is no such stand-in.\n"
        f'raise ValueError(f"{{x}} was told to stop, " + "{"and " * 30}then it ended")\n'
        'name, shown = "so many", f"on {axis} of {mesh}: take `so many` away"\n'
    )
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    assert list(faults(path)) == [
        "module.py:1 begins with 'What'",
        "module.py:3 begins with 'Of'",
        "module.py:5 has 'axis: of'",
        "module.py:15 has a sentence of 38 words",
        "module.py:15 has 'told'",
        "module.py:13 has 'newest one'",
        "module.py:13 has 'goes on'",
    ]
