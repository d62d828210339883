"""What `loractl plan` prints: a screen, a document, settings or a plot of one plan."""

from __future__ import annotations

from typing import Any

import typer

from loractl.output import print_json, printable
from loractl.plan_inputs import PlanOptions, build_question, targets_of
from lorad.errors import LoradError
from lorad.sizing.planner import Plan, make_plan

SCHEMA = "lorad/plan/v1"
_SWEEPS = ("rank", "slots", "context")
_EMITS = ("lorad", "vllm", "sglang", "k8s")


def show_plan(
    options: PlanOptions,
    *,
    explain: bool,
    sweep: str | None,
    plot: str | None,
    emit: str | None,
    as_json: bool,
) -> bool:
    """Make the plan and print it; True if everything fits. Raises `usage.invalid` and others."""
    _one_of("--sweep", sweep, _SWEEPS)
    _one_of("--emit", emit, _EMITS)
    made = make_plan(build_question(options))
    rows = _sweep(made, options, sweep) if sweep else []
    if plot:
        _plot(made, options, plot)
    if emit:
        _emit(made, options, emit)
    elif as_json:
        _print_document(made, explain, sweep, rows)
    elif plot != "term":
        _print_screen(made, explain, sweep, rows)
    return made.fits


def _one_of(option: str, value: str | None, known: tuple[str, ...]) -> None:
    if value is not None and value not in known:
        raise LoradError(
            "usage.invalid", f"{option} {value!r} is not known", hint=f"use {', '.join(known)}"
        )


def _sweep(made: Plan, options: PlanOptions, sweep: str) -> list[Any]:
    from lorad.sizing.sweeps import sweep_contexts, sweep_ranks, sweep_slots

    if sweep == "rank":
        return list(sweep_ranks(made, targets_of(options, made.question.arch)))
    rows: list[Any] = list(sweep_slots(made) if sweep == "slots" else sweep_contexts(made))
    if not rows:
        missing = "--fleet, --trace or --popularity" if sweep == "slots" else "--gpu or --vram"
        raise LoradError("usage.invalid", f"--sweep {sweep} needs {missing}", hint=f"add {missing}")
    return rows


def _plot(made: Plan, options: PlanOptions, plot: str) -> None:
    from loractl.plan_plot import terminal_plot, write_plot

    targets = targets_of(options, made.question.arch)
    if plot == "term":
        typer.echo(terminal_plot(made, targets))
        return
    path = write_plot(made, targets, plot)
    typer.echo(f"wrote {printable(path)}", err=True)


def _emit(made: Plan, options: PlanOptions, emit: str) -> None:
    from loractl.plan_emit import emit_settings
    from loractl.plan_text import lint_lines

    typer.echo(emit_settings(made, options, emit), nl=False)
    for line in lint_lines(made):
        typer.echo(line, err=True)


def _print_document(made: Plan, explain: bool, sweep: str | None, rows: list[Any]) -> None:
    from loractl.plan_report import plan_document

    document = plan_document(made, rows, sweep)
    if explain:
        from loractl.plan_explain import explain_lines

        document["explanation"] = list(explain_lines(made))
    print_json(SCHEMA, document)


def _print_screen(made: Plan, explain: bool, sweep: str | None, rows: list[Any]) -> None:
    from loractl.plan_text import screen_lines, sweep_lines

    lines = list(screen_lines(made))
    if explain:
        from loractl.plan_explain import explain_lines

        lines += ["", "How it is computed", *explain_lines(made)]
    if sweep:
        lines += ["", *sweep_lines(sweep, rows)]
    typer.echo("\n".join(lines))
