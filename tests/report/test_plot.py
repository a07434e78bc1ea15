from __future__ import annotations

import xml.etree.ElementTree as ET

from hypothesis import example, given
from hypothesis import strategies as st

from hullspeed.report.blocks import Percentiles, Plot, Point, Report, Section, Series
from hullspeed.report.html import block_html, page
from hullspeed.report.plot import plot_svg

PLOT = Plot(
    x_label="$ < 5",
    y_label="s",
    series=(
        Series("a & b", (Point(0, 0, "zero"), Point(10, 4, "<top>", marked=True))),
        Series("line", (Point(0, 1), Point(5, 2), Point(10, 0)), line=True),
    ),
    caption="cost",
)


def test_it_is_well_formed_and_within_its_frame() -> None:
    root = ET.fromstring(plot_svg(PLOT))
    svg = root.find("svg")
    assert svg is not None
    _, _, width, height = map(float, svg.attrib["viewBox"].split())
    circles = [circle for circle in svg.findall("circle") if len(circle)]  # not the legend's
    assert [circle[0].text for circle in circles] == ["zero (0.00, 0.00)", "<top> (10.0, 4.00)"]
    for circle in circles:
        assert 0 <= float(circle.attrib["cx"]) <= width
        assert 0 <= float(circle.attrib["cy"]) <= height
    # More is further right and higher up.
    assert float(circles[1].attrib["cx"]) > float(circles[0].attrib["cx"])
    assert float(circles[1].attrib["cy"]) < float(circles[0].attrib["cy"])
    line = svg.find("polyline")
    assert line is not None
    assert len(line.attrib["points"].split()) == 3


def test_the_legend_and_the_ticks_do_not_overlap() -> None:
    """Names of three series, one of them long, stand beside each other or below."""
    names = ("pages held by running sequences, %", "pages of cached prefixes", "x" * 60)
    series = tuple(Series(name, (Point(0, 1), Point(900, 77.6)), line=True) for name in names)
    root = ET.fromstring(plot_svg(Plot(x_label="s", y_label="%", series=series, caption="c")))
    texts = {text.text: text for text in root.iter("text")}
    spans = [(float(texts[n].attrib["y"]), float(texts[n].attrib["x"]),
              float(texts[n].attrib["x"]) + 7 * len(n)) for n in names]  # fmt: skip
    for i, (y, left, right) in enumerate(spans):
        assert right <= 860
        assert all(y != other[0] or right <= other[1] for other in spans[i + 1 :])
        assert left >= 80
    assert {"200", "800", "20", "80"} <= texts.keys()  # round numbers


def test_values_decades_apart_are_logarithmic_and_marks_stand_beside_points() -> None:
    points = (Point(1, 0.2, "fast", True, "1"), Point(2, 700, "slow", True, "2"))
    series = (Series("all", points),)
    svg = plot_svg(Plot(x_label="$", y_label="TTFT, s", series=series, caption="c"))
    texts = [text.text for text in ET.fromstring(svg).iter("text")]
    assert "TTFT, s (logarithmic)" in texts
    assert {"0.1", "1", "10", "100", "1,000", "2"} <= set(texts)


def test_nothing_to_draw_is_said() -> None:
    assert "nothing to draw" in plot_svg(Plot(x_label="x", y_label="y", series=(), caption="c"))


def test_a_page_holds_it() -> None:
    report = Report(title="t", verdict="v", ok=True, sections=(Section("s", (PLOT,)),))
    assert "<svg" in page(report)


@given(st.dictionaries(st.text("pq", min_size=1), st.floats(1e-5, 1e6), min_size=1))
@example({"p": 999999.9999999999})  # whose logarithm is 6
def test_percentiles_lie_in_order_between_the_ticks_of_their_axis(values: dict[str, float]) -> None:
    svg = block_html(Percentiles(unit="ms", series={"a": values})).partition("<div")[0]
    root = ET.fromstring(svg)
    ticks = root.findall("text[@text-anchor='middle']")
    places = {float((t.text or "").replace(",", "")): float(t.attrib["x"]) for t in ticks}
    assert 2 <= len(places) <= 13
    assert min(places) <= min(values.values()) <= max(values.values()) <= max(places)
    xs = [float(circle.attrib["cx"]) for circle in root.findall("circle")]
    for x, value in zip(xs, values.values(), strict=True):
        # Between the two ticks around it, as far as a tenth of a unit is drawn.
        below = max(place for tick, place in places.items() if tick <= value)
        above = min(place for tick, place in places.items() if tick >= value)
        assert below - 0.1 <= x <= above + 0.1
