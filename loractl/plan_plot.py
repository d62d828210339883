"""`loractl plan --plot`: memory by rank, and hits by slots, as a file or on the terminal."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from pathlib import Path

from loractl.output import human_bytes
from loractl.plan_text import screen_lines
from lorad.errors import LoradError
from lorad.sizing.fleet import kind_of_rank
from lorad.sizing.other_engines import VLLM_RANKS, vllm_reservation
from lorad.sizing.planner import Plan
from lorad.sizing.recommend import Workload, slots_curve
from lorad.sizing.svg_chart import Chart, Series, svg_document
from lorad.sizing.sweeps import sweep_slots
from lorad.sizing.targets import Targets

_MIB = 1024**2
_RANKS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128)
_BAR = 40
_CURVE_POINTS = 60


def plan_charts(made: Plan, targets: Targets) -> list[Chart]:
    """One chart, or two where a workload was given."""
    charts, workload = [_rank_chart(made, targets)], made.question.workload
    if workload is not None and len(workload.popularity) > 1:
        charts.append(_slots_chart(made, workload))
    return charts


def _rank_rows(made: Plan, targets: Targets) -> Iterator[tuple[int, int, int]]:
    """(rank, bytes of an adapter, bytes of a slot of vLLM)."""
    question = made.question
    for rank in _RANKS:
        kind = kind_of_rank(question.arch, targets, rank, question.demand.tp)
        slot = vllm_reservation(question.arch, 1, rank, question.sizes.adapters, question.demand.tp)
        yield rank, made.kind_bytes(kind), slot.high if slot else 0


def _rank_chart(made: Plan, targets: Targets) -> Chart:
    rows = list(_rank_rows(made, targets))
    # vLLM's slots grow in stairs: any rank up to the next one it allows costs as much as that.
    stairs = [(rank, slot / _MIB) for rank, _, slot in rows if rank in VLLM_RANKS]
    return Chart(
        title="Memory of one adapter by rank",
        x_label="rank",
        y_label="MiB",
        series=[
            Series("lorad, true rank", [(rank, nbytes / _MIB) for rank, nbytes, _ in rows]),
            Series("one slot of vLLM", stairs, steps=True, dashed=True),
        ],
    )


def _slots_chart(made: Plan, workload: Workload) -> Chart:
    fleet, rec = len(workload.popularity), made.recommendation
    counts = {round(fleet ** (i / (_CURVE_POINTS - 1))) for i in range(_CURVE_POINTS)}
    curve = slots_curve(workload, sorted(counts))
    return Chart(
        title="Requests that find their adapter",
        x_label="adapters on the device",
        y_label="share of requests",
        series=[
            Series("LRU", [(n, lru) for n, lru, _ in curve]),
            Series("most popular pinned", [(n, pinned) for n, _, pinned in curve], dashed=True),
        ],
        percent=True,
        mark=(float(rec.max_loras), f"max_loras {rec.max_loras:,}") if rec else None,
    )


def write_plot(made: Plan, targets: Targets, name: str) -> Path:
    """Write a .svg, .html or .png; raises `usage.invalid` for another kind of file."""
    path = Path(name).expanduser()
    charts = plan_charts(made, targets)
    suffix = path.suffix.lower()
    try:
        if suffix == ".svg":
            path.write_text(svg_document(charts), "utf-8")
        elif suffix == ".html":
            path.write_text(_html(made, charts), "utf-8")
        elif suffix == ".png":
            _png(charts, path)
        else:
            raise LoradError(
                "usage.invalid",
                f"--plot {name!r}: no such kind of picture",
                hint="end it in .svg, .html or .png, or say term for the terminal",
            )
    except OSError as error:
        raise LoradError("usage.invalid", f"--plot: {path} cannot be written: {error}") from None
    return path


def _html(made: Plan, charts: list[Chart]) -> str:
    """One file without scripts or links: the picture, and the screen below it."""
    title = escape(f"loractl plan: {made.question.model}")
    screen = escape("\n".join(screen_lines(made)))
    return (
        f'<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n<title>{title}</title>\n'
        "<style>body{font:16px sans-serif;margin:2rem;max-width:64rem}"
        "svg{max-width:100%;height:auto}pre{overflow-x:auto}</style>\n"
        f"<h1>{title}</h1>\n{svg_document(charts)}<pre>{screen}</pre>\n</html>\n"
    )


def _png(charts: list[Chart], path: Path) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise LoradError(
            "usage.invalid",
            "--plot: a .png needs matplotlib, which is not installed",
            hint="name a .svg or .html file, or pip install matplotlib",
        ) from None
    figure = Figure(figsize=(5.5 * len(charts), 4), layout="constrained")
    for index, chart in enumerate(charts, 1):
        axes = figure.add_subplot(1, len(charts), index)
        for line in chart.series:
            xs, ys = zip(*line.points, strict=True)
            draw = {"drawstyle": "steps-pre"} if line.steps else {}
            axes.plot(xs, ys, label=line.name, linestyle="--" if line.dashed else "-", **draw)
        axes.set_xscale("log", base=2)
        axes.set_ylim(0, chart.y_top)
        axes.set(title=chart.title, xlabel=chart.x_label, ylabel=chart.y_label)
        axes.legend()
    figure.savefig(path, dpi=150)


def terminal_plot(made: Plan, targets: Targets) -> str:
    """Bars for a terminal or a log: memory by rank, then hits by slots."""
    return "\n".join([*_rank_bars(made, targets), *_slots_bars(made)])


def _bar(share: float) -> str:
    """A bar of up to 40 characters, in eighths of one."""
    whole, eighths = divmod(round(max(0.0, min(1.0, share)) * _BAR * 8), 8)
    return "█" * whole + (" ▏▎▍▌▋▊▉"[eighths] if eighths else "")


def _rank_bars(made: Plan, targets: Targets) -> Iterator[str]:
    rows = list(_rank_rows(made, targets))
    top = max(max(nbytes, slot) for _, nbytes, slot in rows)
    yield "Memory of one adapter by rank (vLLM: of one slot)"
    for rank, nbytes, slot in rows:
        yield f"{rank:>7} lorad {human_bytes(nbytes):>10} {_bar(nbytes / top)}"
        yield f"{'':>7} vLLM  {human_bytes(slot):>10} {_bar(slot / top)}"


def _slots_bars(made: Plan) -> Iterator[str]:
    rows = sweep_slots(made)
    if rows:
        yield ""
        yield "Requests that find their adapter, by adapters on the device (LRU, pinned)"
    for row in rows:
        yield f"{row.slots:>7,} LRU   {row.lru:>10.1%} {_bar(row.lru)}"
        yield f"{'':>7} pin   {row.pinned:>10.1%} {_bar(row.pinned)}"
