"""Blocks: what a report says, before it is drawn anywhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hullspeed.findings import Finding
from hullspeed.memory.budget import MemoryStack


@dataclass(frozen=True, slots=True)
class Paragraph:
    """One paragraph of plain text."""

    text: str


@dataclass(frozen=True, slots=True)
class Bullets:
    """A list, a line each."""

    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Code:
    """Text to be copied as it stands: a command, a file."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Cells as text, one row a tuple as long as ``header``.

    Attributes:
        text_columns: How many columns on the left hold words; the others hold numbers and are set
            to the right.
        wide: Its cells are short and many: better wide than folded.
    """

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    caption: str = ""
    text_columns: int = 1
    wide: bool = False

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.header):
                raise ValueError(f"a row of {len(row)} cells under {len(self.header)} headings")


@dataclass(frozen=True, slots=True)
class MemoryBar:
    """The memory of one GPU (or of this machine) as a bar of its terms."""

    stack: MemoryStack


@dataclass(frozen=True, slots=True, kw_only=True)
class Percentiles:
    """Distributions beside each other.

    Attributes:
        unit: Of every value, e.g. ``"ms"``.
        series: By name, e.g. ``"TTFT cold"``, its values by label: ``{"p50": 812.0, ...}``.
    """

    unit: str
    series: Mapping[str, Mapping[str, float]]
    caption: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One prediction beside what was measured.

    Attributes:
        low: Lower end of the prediction's interval.
        high: Upper end.
        measured: ``None`` if it was not measured.
    """

    name: str
    unit: str
    predicted: float
    low: float
    high: float
    measured: float | None = None

    @property
    def error(self) -> float | None:
        """(predicted - measured) / measured."""
        if self.measured is None or self.measured == 0:
            return None
        return (self.predicted - self.measured) / self.measured

    @property
    def inside(self) -> bool | None:
        """Whether the interval holds the measured value."""
        return None if self.measured is None else self.low <= self.measured <= self.high


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Predicted beside measured."""

    rows: tuple[Compared, ...]
    caption: str = ""


@dataclass(frozen=True, slots=True)
class Findings:
    """What plan, preflight or verify saw."""

    findings: tuple[Finding, ...]


@dataclass(frozen=True, slots=True)
class Point:
    """A point of a plot; ``marked`` ones are filled, ``mark`` stands beside it."""

    x: float
    y: float
    label: str = ""
    marked: bool = False
    mark: str = ""


@dataclass(frozen=True, slots=True)
class Series:
    """Points of one kind, joined by a line or not."""

    name: str
    points: tuple[Point, ...]
    line: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """Series over common axes; pages draw it, terminals leave it out. Axes start at zero, those of
    points that lie decades apart are logarithmic.
    """

    x_label: str
    y_label: str
    series: tuple[Series, ...]
    caption: str = ""


Block = Paragraph | Bullets | Code | Table | MemoryBar | Percentiles | Comparison | Findings | Plot


@dataclass(frozen=True, slots=True)
class Section:
    """A heading and what stands under it."""

    title: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A title, one line that says the outcome, and sections."""

    title: str
    verdict: str
    ok: bool
    sections: tuple[Section, ...]


def number(value: float) -> str:
    """Three significant figures without exponents: ``1234.6`` as ``1,235``, ``0.01234`` as
    ``0.0123``.
    """
    size = abs(value)
    if size >= 100:
        return f"{value:,.0f}"
    if size >= 10:
        return f"{value:.1f}"
    if size >= 1 or size == 0:
        return f"{value:.2f}"
    return f"{value:.3g}" if size >= 1e-4 else f"{value:.2e}"
