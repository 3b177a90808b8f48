import pytest

from jaxdist.hlo import is_too_large, refused_bytes

NAMED = "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, "
"""Of some releases of libtpu."""
BARE = "RESOURCE_EXHAUSTED: Ran out of memory on HBM, "
WANTS = "the total memory required for HLO temporaries (117.59G) exceeds available HBM (95.73G)."


@pytest.mark.parametrize("text", [NAMED + WANTS, BARE + WANTS])
def test_a_refusal_is_read(text):
    assert is_too_large(text)
    assert refused_bytes(text) == (117.59 * 2**30, 95.73 * 2**30)


@pytest.mark.parametrize(
    ("text", "too_large"),
    [("RESOURCE_EXHAUSTED: no sizes", True), ("INTERNAL: RET_CHECK (1G) of (2G)", False)],
)
def test_what_tells_no_sizes_has_none(text, too_large):
    assert is_too_large(text) == too_large
    assert refused_bytes(text) is None
