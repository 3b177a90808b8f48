"""Pictures of schedules: text that fits, SVG that is well formed, a trace that Perfetto reads."""

import json
import re
from xml.etree import ElementTree

import pytest

from jaxdist.pipeline_schedules.costs import Costs
from jaxdist.pipeline_schedules.derived import forward_only
from jaxdist.pipeline_schedules.draw.svg import draw_svg
from jaxdist.pipeline_schedules.draw.text import draw_text
from jaxdist.pipeline_schedules.draw.trace import chrome_trace
from jaxdist.pipeline_schedules.gpipe import gpipe
from jaxdist.pipeline_schedules.interleaved import interleaved
from jaxdist.pipeline_schedules.one_f_one_b import one_f_one_b
from jaxdist.pipeline_schedules.simulate import simulate
from jaxdist.pipeline_schedules.zero_bubble.h1 import zb_h1
from jaxdist.pipeline_schedules.zero_bubble.v import zb_v

SVG = "{http://www.w3.org/2000/svg}"


def test_text_with_microbatches():
    assert draw_text(simulate(one_f_one_b(2, 3))).splitlines() == [
        "stage 0 |F0 F1 .  .  B0    F2 B1    .  B2    |",
        "stage 1 |.  F0 B0    F1 B1    F2 B2    .  .  |",
        "3 characters are 1 of 12 units of time",
        "1f1b: 2 stages, 3 microbatches; bubble 3 of 12 (25.0%); at most 2 activations; 6 messages",
    ]


def test_text_without_microbatches_where_it_is_long():
    assert draw_text(simulate(zb_h1(4, 8))).splitlines() == [
        "stage 0 |FFFF...IWFIWFIWFIWFIWIWIWIW|",
        "stage 1 |.FFF..IFIWFIWFIWFIWFIWIWIWW|",
        "stage 2 |..FF.IFIFIWFIWFIWFIWFIWIWWW|",
        "stage 3 |...FIFIFIFIWFIWFIWFIWFIWWWW|",
        "1 character is 1 of 27 units of time",
        "zb_h1: 4 stages, 8 microbatches; bubble 3 of 27 (11.1%); at most 4 activations; "
        "48 messages",
    ]


@pytest.mark.parametrize("columns", [40, 80, 200])
@pytest.mark.parametrize(
    ("made", "costs"),
    [
        (interleaved(4, 8, 2), Costs()),
        (zb_v(8, 32), Costs()),
        (gpipe(12, 3), Costs(1.5, transfer=0.1)),
    ],
)
def test_text_fits(made, costs, columns):
    lines = draw_text(simulate(made, costs), columns).splitlines()
    pictures, note = lines[: made.stages], lines[made.stages]
    assert len({len(line) for line in pictures}) == 1
    assert len(pictures[0]) <= columns
    wide = re.search(r"cut off at (\S+): (\d+) columns would show the whole schedule", note)
    if wide:
        whole = draw_text(simulate(made, costs), int(wide[2])).splitlines()
        assert "cut off" not in whole[made.stages]
        assert len(whole[0]) == int(wide[2])
        assert whole[0].startswith(pictures[0][:-1])


def test_times_without_a_unit_are_to_scale():
    picture = draw_text(simulate(gpipe(2, 1), Costs(0.5, 1.0, 1.0, transfer=0.25)), 70).splitlines()
    # 5.5 units of time in 60 characters: half a unit of each forward, then what travels.
    assert picture[0][9:-1] == "F" * 5 + "." * 33 + "B" * 22
    assert picture[2] == "1 character is 0.09167 of 5.5 units of time"


def test_colour_is_asked_for():
    plain, coloured = (draw_text(simulate(gpipe(2, 2)), colour=colour) for colour in (False, True))
    assert "\x1b" not in plain
    assert re.sub(r"\x1b\[\d+m", "", coloured) == plain
    assert "\x1b[44mF0 \x1b[0m" in coloured


def test_nothing_lasts_no_time():
    assert "0 of 0" in draw_text(simulate(gpipe(1, 1), Costs(0, 0, 0)))


def boxes(picture):
    return [box for box in ElementTree.fromstring(picture).iter(SVG + "rect") if len(box)]


def test_svg_has_a_box_for_every_task():
    timeline = simulate(zb_v(3, 6))
    found = boxes(draw_svg(timeline, 900))
    assert len(found) == sum(map(len, timeline.spans))
    titles = {box[0].text for box in found}
    assert {f"{s.task}: {s.start:g} to {s.end:g}" for row in timeline.spans for s in row} == titles
    for box in found:
        assert 0 <= float(box.get("x")) <= float(box.get("x")) + float(box.get("width")) <= 900
    # Six colours: three kinds, first and second chunk of a stage.
    assert len({box.get("fill") for box in found}) == 6


def test_svg_legend_names_what_is_there():
    def words(made):
        root = ElementTree.fromstring(draw_svg(simulate(made)))
        return " ".join(text.text for text in root.iter(SVG + "text"))

    assert "B backward" in words(gpipe(2, 2))
    assert "lighter" not in words(gpipe(2, 2))
    assert "weight half" in words(zb_v(2, 4))
    assert "lighter" in words(zb_v(2, 4))
    assert "backward" not in words(forward_only((0, 1), 2))
    assert "at most 2 activations" in words(gpipe(2, 2))


def test_svg_escapes_names():
    timeline = simulate(gpipe(1, 1))
    odd = timeline.schedule.__class__("<&>", 1, (0,), timeline.schedule.rows)
    assert "&lt;&amp;&gt;" in draw_svg(simulate(odd))


def test_trace():
    trace = json.loads(json.dumps(chrome_trace(simulate(one_f_one_b(2, 3)), unit_seconds=0.5)))
    names = [event["args"]["name"] for event in trace["traceEvents"] if event["ph"] == "M"]
    assert names == ["pipeline 1f1b", "stage 0", "stage 1"]
    tasks = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(tasks) == 12
    last = tasks[-1]
    assert (last["name"], last["tid"], last["cat"]) == ("1B2", 1, "backward")
    assert (last["ts"], last["dur"]) == (8 * 0.5e6, 2 * 0.5e6)
    assert last["args"] == {"chunk": 1, "microbatch": 2}
