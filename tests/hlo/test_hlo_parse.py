import pytest

from jaxdist.hlo import LedgerError, ledger_of_text
from jaxdist.hlo.parse import ArrayShape, parse, parse_instruction, parse_shapes

LINE = (
    "  ROOT %all-gather-start.1 = ((f32[2,8]{1,0:T(2,128)}, bf16[4]{0}), "
    "/*index=1*/(f32[8,8]{1,0}, bf16[16]{0:T(8)(2,1)S(1)})) "
    "all-gather-start(%a.1, /*index=1*/%b-2), channel_id=3, replica_groups=[2,4]<=[8], "
    'dimensions={0,1}, metadata={op_name="jit(f)/a=\\"b\\"/(c" '
    'stack_frame_id=2}, backend_config={"calls=%x":")"}'
)


def test_a_line_with_everything():
    found = parse_instruction(LINE)
    assert found is not None
    assert (found.name, found.opcode, found.is_root) == (
        "all-gather-start.1",
        "all-gather-start",
        True,
    )
    assert found.operands == ("a.1", "b-2")
    assert [shape.bytes for shape in found.shapes] == [64, 8, 256, 32]
    assert found.number("channel_id") == 3
    assert found.numbers("dimensions") == (0, 1)
    assert found.number("index") is None
    assert found.source == r"jit(f)/a=\"b\"/(c"


@pytest.mark.parametrize(
    ("text", "bytes"),
    [
        ("pred[3]", 3),
        ("s4[3]{0:E(4)}", 2),
        ("f8e4m3fn[2,2]{1,0}", 4),
        ("c64[2]{0}", 16),
        ("token[]", 0),
        ("f32[<=6]{0}", 24),
        ("u32[0]{0}", 0),
    ],
)
def test_bytes(text, bytes):
    (shape,) = parse_shapes(text)
    assert shape.bytes == bytes


def test_layouts_are_no_shapes():
    assert parse_shapes("f32[2]{0:T(8,128)S(1)}") == (ArrayShape("f32", (2,)),)


def test_lines_that_are_none():
    assert parse_instruction("}") is None
    assert parse_instruction("") is None


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("  %a = f32[2] add(%b, %c", r"unbalanced parentheses.*%a = f32\[2\] add"),
        ("  %a = f32[2] , x", r"no operation in the HLO line '%a = f32\[2\]"),
    ],
)
def test_broken_lines_are_refused(line, message):
    with pytest.raises(LedgerError, match=message):
        parse_instruction(line)


@pytest.mark.parametrize(
    "text", ["", "module @jit_f {\n}\n", "HloModule f\n\n%g (a: f32[]) -> f32[] {\n}\n"]
)
def test_other_texts_are_refused(text):
    with pytest.raises(LedgerError, match=r"not a compiled HLO program.*compile\(\)"):
        ledger_of_text(text, {"data": 1})


@pytest.mark.full
def test_a_large_program_is_read_in_seconds():
    """5 MB; the bound is loose, for busy machines."""
    body = "".join(f"  %v{i + 1} = f32[64,64]{{1,0}} add(%v{i}, %v{i})\n" for i in range(100_000))
    text = (
        "HloModule long, num_partitions=1\n\nENTRY %main (v0: f32[64,64]) -> f32[64,64] {\n"
        "  %v0 = f32[64,64]{1,0} parameter(0)\n"
        + body
        + "  ROOT %out = f32[64,64]{1,0} copy(%v7)\n}\n"
    )
    assert len(text) > 4_500_000
    module = parse(text)
    assert len(module.entry.instructions) == 100_002


OVER_LINES = """HloModule over_lines, is_scheduled=true

ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  ROOT %y = f32[8]{0} custom-call(%x), frontend_attributes={kernel_metadata={
"xprof_metadata":"{NOTE"
}}, metadata={op_name="splash"}
}
"""


@pytest.mark.parametrize("note", ["", "}", "{{"])
def test_attributes_over_several_lines_are_one_instruction_s(note):
    root = parse(OVER_LINES.replace("NOTE", note)).entry.root
    assert (root.name, root.operands, root.source) == ("y", ("x",), "splash")
