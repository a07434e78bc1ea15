"""Reports say the same in the terminal and in HTML, and the page needs nothing else."""

from __future__ import annotations

import io
import re
from html.parser import HTMLParser

import pytest
from rich.console import Console

from hullspeed.findings import Finding, Severity
from hullspeed.memory.budget import MemoryItem, MemoryStack, Term
from hullspeed.report.blocks import (
    Bullets,
    Code,
    Compared,
    Comparison,
    Findings,
    MemoryBar,
    Paragraph,
    Percentiles,
    Report,
    Section,
    Table,
    number,
)
from hullspeed.report.html import memory_bar as html_bar
from hullspeed.report.html import page
from hullspeed.report.terminal import memory_bar, render
from hullspeed.units import GIB

EVIL = '<script>alert("x")</script> & "quotes"'


def stack(pool_gib: float = 20.0) -> MemoryStack:
    def item(
        term: Term, name: str, gib: float, interval: tuple[int, int] | None = None
    ) -> MemoryItem:
        return MemoryItem(
            term=term, name=name, bytes=round(gib * GIB), source="a reason", exact=False,
            interval=interval,
        )  # fmt: skip

    return MemoryStack(
        engine="vllm",
        total_bytes=80 * GIB,
        items=(
            item(Term.WEIGHTS, EVIL, 50),
            item(Term.RUNTIME, "graphs", 0.1),
            item(Term.SEQUENCE_STATE, "pool", pool_gib, (18 * GIB, 22 * GIB)),
            item(Term.HEADROOM, "rest", 6),
        ),
    )


def report() -> Report:
    finding = Finding(
        code="X001",
        severity=Severity.ERROR,
        what="it breaks",
        why=EVIL,
        evidence={"seen": "7"},
        fix="do this",
    )
    compared = (
        Compared(name="TTFT", unit="ms", predicted=100, low=80, high=120, measured=110),
        Compared(name="ITL", unit="ms", predicted=10, low=9, high=11, measured=20),
        Compared(name="other", unit="ms", predicted=1, low=1, high=1),
    )
    return Report(
        title=f"Title {EVIL}",
        verdict="fits",
        ok=True,
        sections=(
            Section(
                "Memory",
                (MemoryBar(stack()), Paragraph(EVIL), Bullets(("one", EVIL)), Code("vllm serve x")),
            ),
            Section(
                "Numbers",
                (
                    Table(header=("name", "value"), rows=((EVIL, "1"), ("b", "2")), caption="T"),
                    Percentiles(unit="ms", series={"cold": {"p50": 10.0, "p99": 40.0}, "none": {}}),
                    Comparison(rows=compared),
                    Findings((finding,)),
                ),
            ),
        ),
    )


def printed(width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width, no_color=True)
    render(report(), console)
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


class Audit(HTMLParser):
    """Collects what a page would load or run, and checks that its tags close."""

    def __init__(self) -> None:
        super().__init__()
        self.outside: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("src", "href", "action", "srcset") or name.startswith("on"):
                self.outside.append(f"{tag} {name}={value}")
        if tag in ("script", "iframe", "link", "object", "embed"):
            self.outside.append(tag)
        if tag not in ("meta", "br", "rect", "line", "circle"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if self.open and self.open[-1] == tag:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        if tag in ("rect", "line", "circle"):
            return
        assert self.open, tag
        assert self.open.pop() == tag


def test_the_page_loads_nothing_and_runs_nothing() -> None:
    audit = Audit()
    text = page(report())
    audit.feed(text)
    audit.close()
    assert audit.outside == []
    assert audit.open == []
    assert "http" not in re.sub(r"http-equiv", "", text)


def test_text_from_outside_is_escaped_in_the_page() -> None:
    text = page(report())
    assert "<script>" not in text
    assert text.count("&lt;script&gt;") >= 5


def test_both_forms_carry_every_fact() -> None:
    text, html = printed(), page(report())
    for fact in ("fits", "pool", "20.00 GiB", "18.00 GiB", "vllm serve x", "X001", "it breaks",
                 "do this", "110", "-9%", "-50%"):  # fmt: skip
        assert fact in text, fact
        assert fact in html, fact
    assert "outside" in html


def test_the_terminal_prints_markup_as_text() -> None:
    console = Console(file=io.StringIO(), width=200, no_color=True)
    odd = Report(title="[red]x[/]", verdict="[b]", ok=False, sections=())
    render(odd, console)
    file = console.file
    assert isinstance(file, io.StringIO)
    assert "[red]x[/]" in file.getvalue()


def test_commands_are_never_cut() -> None:
    long = "vllm serve " + "x" * 200
    console = Console(file=io.StringIO(), width=60, no_color=True)
    table = Table(header=("flag", "n"), rows=(("--kv-cache-dtype-of-a-long-name fp8", "1"),))
    sections = (Section("S", (Code(long), table)),)
    render(Report(title="t", verdict="v", ok=True, sections=sections), console)
    file = console.file
    assert isinstance(file, io.StringIO)
    assert "…" not in file.getvalue()


def test_bar_cells_are_shares_and_no_term_vanishes() -> None:
    console = Console(file=io.StringIO(), width=120, no_color=True)
    console.print(memory_bar(stack(), width=80))
    file = console.file
    assert isinstance(file, io.StringIO)
    bar = file.getvalue().splitlines()[0]
    assert bar.count("█") == 50
    assert bar.count("▓") == 20
    assert bar.count("▒") == 1  # 0.1 GiB of 80: small, but there
    assert bar.count("░") == 6


def test_svg_widths_are_shares() -> None:
    widths = [
        float(w) for w in re.findall(r'<rect x="[\d.]+" y="0" width="([\d.]+)"', html_bar(stack()))
    ]
    assert widths == pytest.approx([900 * share / 80 for share in (50, 0.1, 20, 6)], abs=0.1)


def test_a_pool_below_zero_draws_nothing_outside_the_bar() -> None:
    widths = [float(w) for w in re.findall(r'width="([\d.-]+)" height="34"', html_bar(stack(-30)))]
    assert all(w >= 0 for w in widths)
    console = Console(file=io.StringIO(), width=120, no_color=True)
    console.print(memory_bar(stack(-30)))


def test_a_table_refuses_rows_of_another_width() -> None:
    with pytest.raises(ValueError, match="2 cells under 1"):
        Table(header=("a",), rows=(("x", "y"),))


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0.00"), (1234.6, "1,235"), (12.34, "12.3"), (1.234, "1.23"), (0.01234, "0.0123"),
     (-5.0, "-5.00"), (1e-7, "1.00e-07")],
)  # fmt: skip
def test_numbers_have_three_figures(value: float, text: str) -> None:
    assert number(value) == text


def test_error_and_interval_of_a_prediction() -> None:
    row = Compared(name="x", unit="s", predicted=2, low=1, high=3, measured=2.5)
    assert row.error == pytest.approx(-0.2)
    assert row.inside
    assert Compared(name="x", unit="s", predicted=2, low=1, high=3).error is None
    assert Compared(name="x", unit="s", predicted=2, low=1, high=3, measured=0.0).error is None
