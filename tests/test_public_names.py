import subprocess
import sys

import jaxdist


def test_every_public_name_resolves():
    for name in jaxdist.__all__:
        assert getattr(jaxdist, name).__name__ == name
    assert set(jaxdist.__all__) <= set(dir(jaxdist))


def test_an_unknown_name_is_an_attribute_error():
    assert not hasattr(jaxdist, "nothing")


def test_importing_jaxdist_and_its_command_line_imports_no_jax():
    code = "import sys, jaxdist, jaxdist.cli; print('jax' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert out.stdout.strip() == "False", out.stderr
