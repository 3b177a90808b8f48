"""Whose code a config imports is said before it is imported."""

import sys

from jaxdist.config.importing import foreign_code


def test_modules_of_the_working_directory_are_named_and_not_imported(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "whose_mine.py").write_text("raise SystemExit")
    (tmp_path / "whose_pack").mkdir()
    (tmp_path / "whose_pack" / "__init__.py").write_text("raise SystemExit")
    (tmp_path / "whose_space").mkdir()
    values = {
        "model": {"type": "import", "path": "whose_mine:Model"},
        "loss": {"type": "import", "path": "whose_mine:loss"},
        "data": {"type": "images", "transform": {"type": "import", "path": "whose_pack.a.b:f"}},
        "optim": {"type": "import", "path": "optax:lion"},
        "many": [{"type": "import", "path": "whose_space.x:y"}, {"type": "import", "path": "no:x"}],
    }
    assert foreign_code(values) == [
        f"imports {tmp_path}/whose_mine.py for model, loss",
        f"imports {tmp_path}/whose_pack/__init__.py for data.transform",
        f"imports {tmp_path}/whose_space for many.0",
    ]
    assert not [name for name in sys.modules if name.startswith("whose_")]
