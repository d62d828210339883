"""Line charts as SVG text, with nothing but the standard library."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log2, log10

WIDTH, HEIGHT = 460, 330
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 18, 44, 76
# Blue, orange and green that people with any colour vision tell apart (Okabe and Ito).
_COLOURS = ("#0072b2", "#d55e00", "#009e73")
_INK, _SOFT, _GRID = "#1a1a1a", "#666666", "#e2e2e2"


@dataclass(frozen=True)
class Series:
    """One line. `steps` draws it as stairs: the value holds up to the next point."""

    name: str
    points: Sequence[tuple[float, float]]
    steps: bool = False
    dashed: bool = False


@dataclass(frozen=True)
class Chart:
    """Lines over one x axis, which is logarithmic (base 2); y starts at 0.

    `percent` shows y as per cent, up to 1. `mark` is an x to point out, with its words.
    """

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    percent: bool = False
    mark: tuple[float, str] | None = None

    @property
    def xs(self) -> list[float]:
        return sorted({x for line in self.series for x, _ in line.points})

    @property
    def y_top(self) -> float:
        return 1.0 if self.percent else nice_top(max(y for s in self.series for _, y in s.points))


def nice_top(value: float) -> float:
    """The least of 1, 2, 2.5, 5 and 10 times a power of ten that is not below `value`."""
    if value <= 0:
        return 1.0
    power = 10.0 ** floor(log10(value))
    return next(power * step for step in (1, 2, 2.5, 5, 10) if power * step >= value * 0.999)


def svg_document(charts: Sequence[Chart]) -> str:
    """The charts side by side, as one SVG file."""
    width = WIDTH * len(charts)
    body = "\n".join(
        f'<g transform="translate({WIDTH * i} 0)">\n{_chart(chart)}\n</g>'
        for i, chart in enumerate(charts)
    )
    title = escape("; ".join(chart.title for chart in charts))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {HEIGHT}" '
        f'width="{width}" height="{HEIGHT}" role="img" '
        f'font-family="Helvetica, Arial, sans-serif" font-size="12">\n'
        f"<title>{title}</title>\n"
        f'<rect width="{width}" height="{HEIGHT}" fill="#ffffff"/>\n{body}\n</svg>\n'
    )


@dataclass(frozen=True)
class _Axes:
    """From data to pixels."""

    low: float  # log2 of the smallest x
    span: float
    top: float

    @classmethod
    def of(cls, chart: Chart) -> _Axes:
        low, high = log2(chart.xs[0]), log2(chart.xs[-1])
        return cls(low, max(high - low, 1e-9), chart.y_top)

    def x(self, value: float) -> float:
        return round(_LEFT + (log2(value) - self.low) / self.span * (WIDTH - _LEFT - _RIGHT), 1)

    def y(self, value: float) -> float:
        height = HEIGHT - _TOP - _BOTTOM
        return round(HEIGHT - _BOTTOM - min(value / self.top, 1.0) * height, 1)


def _chart(chart: Chart) -> str:
    axes = _Axes.of(chart)
    parts = [
        _text(_LEFT, 24, chart.title, size=14, weight="bold"),
        *_y_axis(chart, axes),
        *_x_axis(chart, axes),
        *_mark(chart, axes),
    ]
    for i, line in enumerate(chart.series):
        parts += [_line(line, axes, _COLOURS[i % 3]), *_legend(line, i)]
    return "\n".join(parts)


def _text(
    x: float,
    y: float,
    text: str,
    size: int = 12,
    anchor: str = "start",
    fill: str = _INK,
    weight: str = "normal",
) -> str:
    return (
        f'<text x="{x}" y="{y}" font-size="{size}" text-anchor="{anchor}" fill="{fill}" '
        f'font-weight="{weight}">{escape(text)}</text>'
    )


def _y_axis(chart: Chart, axes: _Axes) -> Iterator[str]:
    for i in range(5):
        value = axes.top * i / 4
        y = axes.y(value)
        yield f'<path d="M{_LEFT} {y}H{WIDTH - _RIGHT}" stroke="{_GRID}"/>'
        label = f"{value:.0%}" if chart.percent else f"{value:g}"
        yield _text(_LEFT - 6, y + 4, label, anchor="end", fill=_SOFT)
    yield _text(_LEFT, 39, chart.y_label, size=11, fill=_SOFT)


def _x_axis(chart: Chart, axes: _Axes) -> Iterator[str]:
    powers = range(ceil(axes.low - 1e-9), floor(axes.low + axes.span + 1e-9) + 1)
    every = ceil(len(powers) / 11) if powers else 1
    for power in list(powers)[::every]:
        yield _text(axes.x(2.0**power), HEIGHT - _BOTTOM + 18, f"{2**power:,}", 11, "middle", _SOFT)
    middle = (_LEFT + WIDTH - _RIGHT) / 2
    yield _text(middle, HEIGHT - _BOTTOM + 36, chart.x_label, 11, "middle", _SOFT)


def _mark(chart: Chart, axes: _Axes) -> Iterator[str]:
    if chart.mark is None:
        return
    x = axes.x(chart.mark[0])
    yield f'<path d="M{x} {_TOP}V{HEIGHT - _BOTTOM}" stroke="{_SOFT}" stroke-dasharray="2 3"/>'
    right = x > (_LEFT + WIDTH - _RIGHT) / 2
    anchor, shift = ("end", -5) if right else ("start", 5)
    yield _text(x + shift, HEIGHT - _BOTTOM - 8, chart.mark[1], 11, anchor, _SOFT)


def _line(line: Series, axes: _Axes, colour: str) -> str:
    path = ""
    for i, (x, y) in enumerate(line.points):
        step = f"V{axes.y(y)}" if line.steps and i else ""
        path += f"{step}{'L' if i else 'M'}{axes.x(x)} {axes.y(y)}"
    dash = ' stroke-dasharray="6 4"' if line.dashed else ""
    return f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>'


def _legend(line: Series, index: int) -> Iterator[str]:
    x, y = _LEFT + index * 190, HEIGHT - 16
    dash = ' stroke-dasharray="6 4"' if line.dashed else ""
    colour = _COLOURS[index % 3]
    yield f'<path d="M{x} {y - 4}h22" stroke="{colour}" stroke-width="2"{dash}/>'
    yield _text(x + 28, y, line.name)
